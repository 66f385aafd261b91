"""Advice on runs, without torch: what to change, and what the simulator says that it brings.

question.py   what is asked; every layout that it allows
search.py     the fastest layouts that fit; what is left out without a plan, by bounds.py, which asks lists.py what it
              knows of a schedule: when its actions can run, and what is held at once
sheets.py     one layout's plan, simulated: its time by cause, its memory; durations and bytes in few digits
changes.py    what would change the answer
words.py      the answer in words and in JSON
recorded.py   a machine as a recorded run found it
"""
