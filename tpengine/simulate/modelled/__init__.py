"""Costs and bytes of a step from its configuration alone."""
