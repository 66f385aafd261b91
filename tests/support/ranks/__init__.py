"""Processes that work together, and proofs that none of them works any more."""
