"""A training run: its state on a rank, the step that changes it, the trainer that has both, and the loop around it."""
