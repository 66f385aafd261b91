"""One training run from start to finish.

memory_limit.py   whether it fits, before it starts
job.py            what a rank is given
opening.py        what is said and written before the first step, and the writer of metrics
loop.py           set up, train, evaluate, save, sample
"""
