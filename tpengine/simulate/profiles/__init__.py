"""Costs of a step from a measured run.

file.py (what a profile holds, and its file) with ranks.py (what each rank did) and fields.py (checks of a file's
fields); costs.py predicts other plans of the profile's model.
"""
