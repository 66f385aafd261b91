"""Data parallelism of the engine's plan: flat gradient buckets reduced while backward runs, and ZeRO's weights."""
