"""Recorded steps: who waited for whom, and costs that predict other schedules."""
