"""Parameters that several tensor-parallel ranks hold whole: their gradients are summed, and counted once in the norm.

modules.py   sum the gradients of any module's parameters, and refuse a model in which nothing sums them
clip.py      clip by the norm of all gradients of a model of your own
"""
