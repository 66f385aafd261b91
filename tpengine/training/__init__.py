"""A training run: the trainer of one step, and the loop around it."""
