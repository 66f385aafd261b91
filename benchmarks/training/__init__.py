"""Whole steps against torch's parallelism, and against other revisions."""
