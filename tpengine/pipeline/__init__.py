"""Pipelines: the executor of a plan, its handlers, and `Pipeline` for any nn.Sequential."""

from tpengine.pipeline.sequential import Pipeline

__all__ = ["Pipeline"]
