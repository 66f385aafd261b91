"""What the cases run, each in a process of its own: functions that write rows and return 1 if a result is wrong."""
