"""Engines and runs that are compared with each other."""
