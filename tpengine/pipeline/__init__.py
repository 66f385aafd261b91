"""Pipelines: the plan's executor and its handlers, and `Pipeline` for any sequence of modules."""

from tpengine.pipeline.sequential import Pipeline

__all__ = ["Pipeline"]
