"""`tpengine import` and `tpengine export`: weights of transformers' form, and those of runs.

arguments.py        what the two commands understand
import_weights.py   a directory, or a run's checkpoint, as a run that has not begun
export.py           a checkpoint as a directory that transformers loads
progress.py         how far a command has come that writes many bytes
"""
