"""Reasons why a step takes as long as it does, each with what its removal is worth.

slow_ranks.py   a rank, or a stage, that computes longer than the others
bubble.py       too few micro-batches
exchanges.py    communication that nothing hides
memory.py       what a lack of memory costs
host.py         input, and starts of what a GPU computes
"""
