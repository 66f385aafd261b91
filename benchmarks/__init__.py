"""Benchmarks, run from the repository root: `python -m benchmarks.run --list`. Nothing imports this package."""
