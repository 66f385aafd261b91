"""Recorded steps: who waited for whom, and costs that predict other schedules; whom a rank waits for that hangs."""
