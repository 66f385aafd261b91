"""The configuration of a run, and which configurations are legal. No torch.

settings.py      the settings: dataclasses, nothing else
amounts.py       lengths in steps or in tokens
lengths.py       a step by its sequences, a run by its tokens or epochs
nearest.py       legal values near a wrong one
details.py       what an architecture adds to the sizes of a model, out of its config.json
detail_rules.py  the ranges of those numbers
rules.py         which values are legal, and how sizes that were left out are filled in
spikes.py        what is done about a step that leaps, and what counts as one
phases.py        the phases of a run: their steps, their settings, where their samples begin
step_numbers.py  how files and lines count steps
toml.py          a configuration written as TOML and read back
toml_file.py     a TOML file, read
presets.py       named runs
exact_sizes.py   how exact mode cuts model and batch, independently of the layout
"""

from tpengine.config.exact_sizes import num_blocks, num_shards_of, shards_said
from tpengine.config.phases import Phase, Phases, phases_of, samples_per_step, validate_run
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
    num_evaluated,
)
from tpengine.config.spikes import SpikeRule, spike_rule_of

__all__ = [
    "IGNORED_LABEL",
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "Phase",
    "Phases",
    "SpikeRule",
    "TrainConfig",
    "decay_steps_of",
    "num_blocks",
    "num_evaluated",
    "num_shards_of",
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
