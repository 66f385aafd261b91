"""Seconds of a chunk's actions on a machine. No torch.

operators.py (single operators of a tp rank), attention.py (its attention), packed.py (pairs of queries and keys in
packed documents), chunk.py (which of them each action has), sums.py (how they are added up).
"""
