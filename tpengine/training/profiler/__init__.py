"""Profiles of recorded steps, costs that predict other schedules, and the ranks that a stuck rank waits for.

chosen.py      which steps a run records by itself
profiler.py    records steps and writes what they show; clocks.py has their clocks, meter.py what the host sees,
               ends.py what the embedding, head and loss take
waiting.py     for whom a stuck rank waits, and peers.py which of those are gone
"""
