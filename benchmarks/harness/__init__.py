"""Shared by all benchmarks: interleaved timing, rows of results, tables, the registry."""
