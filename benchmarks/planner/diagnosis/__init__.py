"""Faults put into real runs, and whether `tpengine diagnose` names them and says what their removal brings.

command.py    visits cases with and without their fault in turns, and keeps a journal; table.py, what it found
cases.py      the faults, their sizes, and the healthy runs
faults.py     runs whose blocks take the time they are told to, and what can be wrong with them; member.py, one rank
"""
