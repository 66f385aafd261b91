"""`DataParallel`, alone and with `ShardedOptimizer`, against torch's own data parallelism.

options.py    sizes, and what is refused
command.py    the command: contestants take turns; rows and table
replica.py    one rank of a contestant: its model, its time, its memory, whether its weights are right
"""
