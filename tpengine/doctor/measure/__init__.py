"""Rates of one rank, by microbenchmarks of the engine's own operators; nothing of a training step is timed as a whole.

member.py (a rank), sizes.py (what is measured), clock.py (how calls are timed), heap.py, products.py, operators.py,
exchanges.py and host.py (what is measured).
"""
