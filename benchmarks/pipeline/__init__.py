"""Schedules against torch's pipelining, and against the simulator."""
