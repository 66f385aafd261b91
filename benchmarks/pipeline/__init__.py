"""Schedules against torch's pipelining; the simulator's predictions against measured and against published steps."""
