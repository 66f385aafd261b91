"""`tpengine watch`: what one or several runs report, drawn in the terminal and as an SVG. No torch.

command.py    the command: one picture, or one that follows the runs
history.py    a run's metrics.jsonl as series of numbers and events
terminal.py   panels of a terminal
picture.py    the same panels as one SVG
"""
