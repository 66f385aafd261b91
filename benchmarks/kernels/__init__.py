"""Operators against torch's, and against the kernels of another revision."""
