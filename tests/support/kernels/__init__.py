"""Kernels compiled, interpreted and looked at."""
