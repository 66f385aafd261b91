"""One training run from start to finish.

job.py      what a rank is given
opening.py  what is said and written before the first step, and the writer of metrics
loop.py     set up, train, evaluate, save, sample
"""
