"""Costs of a step from a measured run."""
