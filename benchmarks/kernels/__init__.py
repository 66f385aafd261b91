"""Operators against torch's, and the kernels of any revision."""
