"""Bytes that our layers hold, from the configuration alone. No torch.

bytes.py (what a block keeps), working.py (what our layers hold while they run), activations.py (both, by chunk),
prepared.py (copies of weights on a CPU), touched.py (all that passes through the caches).
"""
