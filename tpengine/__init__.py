"""tpengine: tensor x pipeline x data parallel transformer training, driven by one verified plan.

Importing the package loads nothing, and no torch. The names that runs, models, optimizers and plans are built with
load on first use (PEP 562); all others are in its modules. README.md beside this file says which to read first.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpengine.config import (
        Config,
        DataConfig,
        ModelConfig,
        OptimConfig,
        ParallelConfig,
        ParameterGroup,
        TrainConfig,
    )
    from tpengine.data import Column, TokenWriter, write_column, write_tokens
    from tpengine.layers import (
        IGNORED_LABEL,
        Attention,
        ColumnParallelLinear,
        Communicator,
        Documents,
        Dropout,
        FeedForward,
        KeyValueCache,
        LayerNorm,
        LearnedPositions,
        MixtureOfExperts,
        Norm,
        OffsetRMSNorm,
        PackedWeights,
        Placement,
        Position,
        RMSNorm,
        Rotation,
        RowParallelLinear,
        Scores,
        SpreadExperts,
        SwiGLU,
        VocabParallelEmbedding,
        WidthNorm,
        check_replicated,
        clip_grad_norm_,
        norm_over_ranks,
        placements_of,
        replicate,
        sharded,
        summed,
        vocab_parallel_cross_entropy,
    )
    from tpengine.modules import DataParallel, Pipeline, ShardedOptimizer, parallelize
    from tpengine.plan import SCHEDULES, Plan, Schedule, make_schedule
    from tpengine.runs.callbacks import Callback
    from tpengine.runs.job import RunResult
    from tpengine.train import run
    from tpengine.training.elementwise import UpdateRule
    from tpengine.training.last_output import LastOutput
    from tpengine.training.objective import MicroBatch, Objective

__version__: str

# A name and its module, as above.
_HOME = {
    "Config": "config",
    "DataConfig": "config",
    "ModelConfig": "config",
    "OptimConfig": "config",
    "ParallelConfig": "config",
    "ParameterGroup": "config",
    "TrainConfig": "config",
    "Column": "data",
    "TokenWriter": "data",
    "write_column": "data",
    "write_tokens": "data",
    "DataParallel": "modules",
    "ShardedOptimizer": "modules",
    "LastOutput": "training.last_output",
    "MicroBatch": "training.objective",
    "Objective": "training.objective",
    "IGNORED_LABEL": "layers",
    "Attention": "layers",
    "ColumnParallelLinear": "layers",
    "Communicator": "layers",
    "Documents": "layers",
    "Dropout": "layers",
    "FeedForward": "layers",
    "KeyValueCache": "layers",
    "LayerNorm": "layers",
    "LearnedPositions": "layers",
    "MixtureOfExperts": "layers",
    "Norm": "layers",
    "OffsetRMSNorm": "layers",
    "PackedWeights": "layers",
    "Placement": "layers",
    "Position": "layers",
    "RMSNorm": "layers",
    "Rotation": "layers",
    "RowParallelLinear": "layers",
    "Scores": "layers",
    "SpreadExperts": "layers",
    "SwiGLU": "layers",
    "VocabParallelEmbedding": "layers",
    "WidthNorm": "layers",
    "norm_over_ranks": "layers",
    "check_replicated": "layers",
    "clip_grad_norm_": "layers",
    "placements_of": "layers",
    "replicate": "layers",
    "sharded": "layers",
    "summed": "layers",
    "vocab_parallel_cross_entropy": "layers",
    "parallelize": "modules",
    "Pipeline": "modules",
    "SCHEDULES": "plan",
    "Plan": "plan",
    "Schedule": "plan",
    "make_schedule": "plan",
    "Callback": "runs.callbacks",
    "RunResult": "runs.job",
    "run": "train",
    "UpdateRule": "training.elementwise",
}

__all__ = [
    "IGNORED_LABEL",
    "SCHEDULES",
    "Attention",
    "Callback",
    "Column",
    "ColumnParallelLinear",
    "Communicator",
    "Config",
    "DataConfig",
    "DataParallel",
    "Documents",
    "Dropout",
    "FeedForward",
    "KeyValueCache",
    "LastOutput",
    "LayerNorm",
    "LearnedPositions",
    "MicroBatch",
    "MixtureOfExperts",
    "ModelConfig",
    "Norm",
    "Objective",
    "OffsetRMSNorm",
    "OptimConfig",
    "PackedWeights",
    "ParallelConfig",
    "ParameterGroup",
    "Pipeline",
    "Placement",
    "Plan",
    "Position",
    "RMSNorm",
    "Rotation",
    "RowParallelLinear",
    "RunResult",
    "Schedule",
    "Scores",
    "ShardedOptimizer",
    "SpreadExperts",
    "SwiGLU",
    "TokenWriter",
    "TrainConfig",
    "UpdateRule",
    "VocabParallelEmbedding",
    "WidthNorm",
    "check_replicated",
    "clip_grad_norm_",
    "make_schedule",
    "norm_over_ranks",
    "parallelize",
    "placements_of",
    "replicate",
    "run",
    "sharded",
    "summed",
    "vocab_parallel_cross_entropy",
    "write_column",
    "write_tokens",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            return importlib.metadata.version("tpengine")
        except importlib.metadata.PackageNotFoundError:
            return "0+checkout"  # on the path, and not installed
    if name not in _HOME:
        raise AttributeError(f"module 'tpengine' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"tpengine.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
