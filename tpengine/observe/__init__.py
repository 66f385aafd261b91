"""What a run says of itself: what it waits for, its metrics, its traces, its last words."""
