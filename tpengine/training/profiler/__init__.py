"""Profiles of recorded steps, costs that predict other schedules, and the ranks that a stuck rank waits for."""
