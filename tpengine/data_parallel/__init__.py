"""Data parallelism: flat gradient buckets, reduced inside the last micro-batch's backward as the plan says."""

from tpengine.data_parallel.buckets import GradientBuckets

__all__ = ["GradientBuckets"]
