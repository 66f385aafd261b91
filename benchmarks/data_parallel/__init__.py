"""`DataParallel` at zero 0 to 3 against torch's own sharded data parallelism.

options.py    sizes, and what is refused
command.py    the command: contestants take turns; rows and table
replica.py    one rank of a contestant: its model, its time, its memory, whether its weights are right
"""
