"""Pipelines: the executor of a plan, its handlers, transfers and what is loaded before the first."""
