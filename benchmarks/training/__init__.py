"""Whole training steps against torch's own parallelism and other revisions; importing weights against transformers."""
