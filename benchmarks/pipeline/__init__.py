"""Schedules against torch's pipelining, and predictions of the simulator against measurements."""
