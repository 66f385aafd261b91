"""What a run reports: what each rank waits for, metrics, traces, and the reason when it ends."""
