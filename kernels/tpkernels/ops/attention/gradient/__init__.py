"""Gradients of attention: backward.py launches kernel.py, which computes scores again; turns.py orders its adds."""
