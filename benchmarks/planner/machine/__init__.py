"""A machine's file for the planner, from microbenchmarks; nothing of a training step is timed as a whole.

command.py (options, the file), rank.py (one process's measurements), products.py, operators.py, exchanges.py and
host.py (what is measured), clock.py (how).
"""
