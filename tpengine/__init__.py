"""tpengine: tensor x pipeline x data parallel transformer training, driven by one verified plan.

Importing the package loads nothing, and no torch. The names that models, optimizers and plans are built with load on
first use (PEP 562); all others are in its modules. README.md beside this file says which to read first.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpengine.config import Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
    from tpengine.data import write_tokens
    from tpengine.data_parallel import DataParallel
    from tpengine.layers import (
        IGNORED_LABEL,
        Attention,
        ColumnParallelLinear,
        Documents,
        KeyValueCache,
        PackedWeights,
        RMSNorm,
        RowParallelLinear,
        SwiGLU,
        VocabParallelEmbedding,
        check_replicated,
        clip_grad_norm_,
        replicate,
        sharded,
        summed,
        vocab_parallel_cross_entropy,
    )
    from tpengine.layers.collectives import Communicator
    from tpengine.model.foreign import parallelize
    from tpengine.pipeline import Pipeline
    from tpengine.plan import SCHEDULES, Plan, Schedule, make_schedule

__version__: str

# A name and its module, as above.
_HOME = {
    "Config": "config",
    "DataConfig": "config",
    "ModelConfig": "config",
    "OptimConfig": "config",
    "ParallelConfig": "config",
    "TrainConfig": "config",
    "write_tokens": "data",
    "DataParallel": "data_parallel",
    "IGNORED_LABEL": "layers",
    "Attention": "layers",
    "ColumnParallelLinear": "layers",
    "Documents": "layers",
    "KeyValueCache": "layers",
    "PackedWeights": "layers",
    "RMSNorm": "layers",
    "RowParallelLinear": "layers",
    "SwiGLU": "layers",
    "VocabParallelEmbedding": "layers",
    "check_replicated": "layers",
    "clip_grad_norm_": "layers",
    "replicate": "layers",
    "sharded": "layers",
    "summed": "layers",
    "vocab_parallel_cross_entropy": "layers",
    "Communicator": "layers.collectives",
    "parallelize": "model.foreign",
    "Pipeline": "pipeline",
    "SCHEDULES": "plan",
    "Plan": "plan",
    "Schedule": "plan",
    "make_schedule": "plan",
}

__all__ = [
    "IGNORED_LABEL",
    "SCHEDULES",
    "Attention",
    "ColumnParallelLinear",
    "Communicator",
    "Config",
    "DataConfig",
    "DataParallel",
    "Documents",
    "KeyValueCache",
    "ModelConfig",
    "OptimConfig",
    "PackedWeights",
    "ParallelConfig",
    "Pipeline",
    "Plan",
    "RMSNorm",
    "RowParallelLinear",
    "Schedule",
    "SwiGLU",
    "TrainConfig",
    "VocabParallelEmbedding",
    "check_replicated",
    "clip_grad_norm_",
    "make_schedule",
    "parallelize",
    "replicate",
    "sharded",
    "summed",
    "vocab_parallel_cross_entropy",
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
