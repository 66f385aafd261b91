"""Text from a model: see README.md."""
