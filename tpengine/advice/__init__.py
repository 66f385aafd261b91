"""Advice on runs, without torch: what to change, and what the simulator says that it brings.

diagnose/    a run that has recorded steps: why its step takes as long as it does
published/   published training runs of any engine, predicted row by row
"""
