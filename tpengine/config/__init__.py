"""The configuration of a run, and which configurations are legal. No torch."""

from tpengine.config.exact_sizes import num_blocks, virtual_tp_of
from tpengine.config.rules import profiled_steps, resolve_layout, schedule_of, validate
from tpengine.config.settings import (
    IGNORED_LABEL,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    decay_steps_of,
)

__all__ = [
    "IGNORED_LABEL",
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "TrainConfig",
    "decay_steps_of",
    "num_blocks",
    "profiled_steps",
    "resolve_layout",
    "schedule_of",
    "validate",
    "virtual_tp_of",
]
