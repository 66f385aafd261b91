"""Data parallelism: flat gradient buckets reduced while backward runs, for the engine's plan and for any module."""

from tpengine.data_parallel.block_sums import BlockSums
from tpengine.data_parallel.buckets import GradientBuckets
from tpengine.data_parallel.module import DataParallel
from tpengine.data_parallel.sharded_optimizer import ShardedOptimizer

__all__ = ["BlockSums", "DataParallel", "GradientBuckets", "ShardedOptimizer"]
