"""A machine's file for the planner, from microbenchmarks; nothing of a training step is timed as a whole.

command.py has the options and the passes; what is measured, and how, is in tpengine/doctor/measure/, which `tpengine
doctor` uses too.
"""
