"""Whole training steps against torch's own parallelism, and against other revisions."""
