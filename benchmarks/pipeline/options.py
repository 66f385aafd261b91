"""What the pipeline benchmark runs: its options, and the configuration of a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.training.command import base_config
from tpengine.config import Config, ModelConfig, validate

_SMOKE_MODEL = ModelConfig(hidden_size=32, num_layers=8, num_heads=4, num_kv_heads=2, ffn_size=48)
_MODEL_FIELDS = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn_size", "vocab_size")
_BATCH_FIELDS = ("seq_len", "micro_batch_size", "num_micro_batches")


@dataclass(frozen=True)
class Options:
    """Compare pipelines, or predict their steps."""

    against: Literal["torch"] = "torch"
    """torch.distributed.pipelining."""
    predict: bool = False
    """Instead of a comparison: profile a step, simulate others, run them, and print by how much they differ."""
    pp: int = 2
    """Pipeline ranks; one core for each."""
    micro_batches: int = 8
    """Micro-batches per step; with --predict, of the step that is profiled."""
    schedules: tuple[str, ...] | None = None
    """Names, separated by spaces or commas; by default all that both sides have, with --predict all."""
    micro_batch_size: int | None = None
    """Sequences per micro-batch; by default 2, with --predict 1."""
    rounds: int = 5
    """Timed steps of each contestant."""
    memory_steps: int = 1
    """Steps of each contestant in which memory is measured."""
    predicted_micro_batches: tuple[int, ...] = (12, 16)
    """With --predict: numbers of micro-batches of the steps that are predicted."""
    profiled_schedule: str = "zbv"
    """With --predict: the schedule that is profiled. zbv separates both halves of a backward, and the model's ends."""
    waiting_ranks: int = 4
    """With --predict: number of ranks in the test of the executor, whose stages wait instead of computing."""
    preset: str = "bench"
    """Model and length of a sequence."""
    config: Path | None = None
    """TOML file applied over the preset."""
    smoke: bool = False
    """A miniature model in few steps: it shows that everything runs; the numbers mean nothing."""
    out: Path | None = None
    """Append JSON lines to this file; results to keep go to benchmarks/results."""


def shrunk(options: Options) -> Options:
    """Return the options in the size of a smoke test."""
    return replace(
        options,
        micro_batches=min(options.micro_batches, 4),
        micro_batch_size=1,
        rounds=1,
        memory_steps=1,
        predicted_micro_batches=options.predicted_micro_batches[:1],
    )


def names_of(schedules: Sequence[str]) -> list[str]:
    """Return the schedules from the command line, each once."""
    return list(dict.fromkeys(name for text in schedules for name in text.split(",") if name))


def config_of(options: Options, schedule: str, num_micro_batches: int, pp: int | None = None) -> Config:
    """Return the configuration that a contestant runs.

    Raises:
        ValueError: sizes that are not possible; see config.validate.
    """
    config = base_config(options.preset, options.config)
    if options.smoke:
        config = replace(config, model=_SMOKE_MODEL, train=replace(config.train, seq_len=16))
    num_ranks = pp or options.pp
    size = options.micro_batch_size or (1 if options.predict else 2)
    return validate(
        replace(
            config,
            parallel=replace(config.parallel, tp=1, dp=1, pp=num_ranks, schedule=schedule),
            train=replace(config.train, micro_batch_size=size, num_micro_batches=num_micro_batches),
        ),
        num_ranks,
    )


def sizes_of(config: Config) -> dict[str, Any]:
    """Return the row's fields about its run."""
    model, train = config.model, config.train
    return {
        "schedule": config.parallel.schedule,
        "pp": config.parallel.pp,
        "dtype": train.dtype,
        "model": {name: getattr(model, name) for name in _MODEL_FIELDS},
        "batch": {name: getattr(train, name) for name in _BATCH_FIELDS},
    }
