"""Advice on runs, without torch: what to change, and what the simulator says that it brings.

question.py, candidates.py    what is asked; every layout that it allows
changes.py, words.py          what would change the answer; the answer in words and in JSON
units.py                      durations and bytes in few digits
recorded.py                   a machine as a recorded run found it
sheets/      one layout's plan, simulated: its time by cause, its memory
search/      what is left out without a plan; the fastest that fit
diagnose/    a run that has recorded steps: why its step takes as long as it does
"""
