"""Seconds of a chunk's actions on a machine. No torch.

operators.py (the operators of a chunk), packed.py (pairs of queries and keys in packed documents).
"""
