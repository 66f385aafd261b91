"""The configuration of a run, and which configurations are legal. No torch.

settings.py     the settings: dataclasses, nothing else; what an architecture adds; what train.spike says
lengths.py      lengths in steps or tokens; a step by its sequences, a run by its tokens or epochs
ranges.py       which values are legal by themselves, and legal ones near a wrong one
optimizers.py   which optimizers there are, and what each keeps of a weight
rules.py        which are legal together, and how sizes that were left out are filled in
phases.py       the phases of a run: their steps, their settings, where their samples begin
toml.py         a configuration written as TOML and read back
presets.py      named runs
exact_sizes.py  how exact mode cuts model and batch, independently of the layout
"""

from tpengine.config.exact_sizes import num_blocks, num_shards_of, shards_said
from tpengine.config.optimizers import OptimizerKind, optimizer_kind
from tpengine.config.phases import Phase, Phases, phases_of, samples_per_step, validate_run
from tpengine.config.rules import profiled_steps, resolve_layout, schedule_of, validate
from tpengine.config.settings import (
    IGNORED_LABEL,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ParameterGroup,
    SpikeRule,
    TrainConfig,
    decay_steps_of,
    num_evaluated,
    spike_rule_of,
)

__all__ = [
    "IGNORED_LABEL",
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "OptimizerKind",
    "ParallelConfig",
    "ParameterGroup",
    "Phase",
    "Phases",
    "SpikeRule",
    "TrainConfig",
    "decay_steps_of",
    "num_blocks",
    "num_evaluated",
    "num_shards_of",
    "optimizer_kind",
    "phases_of",
    "profiled_steps",
    "resolve_layout",
    "samples_per_step",
    "schedule_of",
    "shards_said",
    "spike_rule_of",
    "validate",
    "validate_run",
]
