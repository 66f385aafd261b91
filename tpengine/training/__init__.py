"""A training run: the trainer, which runs one step, and the loop around it."""
