"""Costs and bytes of a step from its configuration alone. No torch.

memory.py       what a rank holds, by kind
costs.py        the step's durations and sizes, and what each action takes
chunk.py        seconds of a chunk's actions on a machine
operators.py    seconds of single operators of a tp rank
activations.py  bytes of a chunk: what is kept of a micro-batch, and what layers hold while they run
exchanged.py    bytes that ranks exchange for experts
caches.py       prepared copies of weights, and all that passes through the caches

The files import each other from top to bottom.
"""
