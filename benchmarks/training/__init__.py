"""Whole steps against torch's own parallelism and other revisions; importing weights, and generating text."""
