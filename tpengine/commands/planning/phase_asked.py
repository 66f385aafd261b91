"""Which phase of a run a plan is of: each has its own batch, lengths and plan, but all have one split of layers."""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

from tpengine.commands.parsing import count
from tpengine.config import Config, phases_of, validate_run
from tpengine.layout.phase_layouts import longest_of


class AskedPhase(NamedTuple):
    """A phase of a run.

    Attributes:
        config: what the phase trains with.
        balanced_for: the sequence length that the run's layers are balanced for; 0 for the configuration's.
        words: which phase it is, of how many; empty for a run of one.
    """

    config: Config
    balanced_for: int = 0
    words: str = ""


def add_phase_arguments(parser: argparse._ActionsContainer, number: bool = True) -> None:
    """Add --phases, and --phase if one of them is shown."""
    parser.add_argument("--phases", metavar="FILE.toml", help="as in training: the phases of the run")
    if number:
        parser.add_argument("--phase", type=count, metavar="N", help="which of them is shown (default 1)")


def all_phases(config: Config) -> list[AskedPhase]:
    """Return all phases of a configuration whose layout is given; of one without phases itself.

    Raises:
        ValueError: the file cannot be read, or a phase is not legal in this layout.
    """
    if not config.phases:
        return [AskedPhase(config)]
    parallel = config.parallel
    sizes = (parallel.tp or 1, parallel.pp or 1, parallel.dp or 1)
    phases = phases_of(validate_run(config, math.prod(sizes)))
    balanced_for = longest_of(phases).config.train.seq_len
    return [
        AskedPhase(
            phase.config,
            balanced_for,
            f"phase {phase.number + 1} of {len(phases)}, steps {phase.first_step + 1} to {phase.end_step}: "
            f"{phase.config.train.num_micro_batches} micro-batches of {phase.config.train.micro_batch_size} x "
            f"{phase.config.train.seq_len} tokens per replica",
        )
        for phase in phases
    ]


def phase_asked(config: Config, number: int | None) -> AskedPhase:
    """Return one phase of a configuration, by default the first.

    Raises:
        ValueError: as all_phases; there is no such phase.
    """
    phases = all_phases(config)
    if not 1 <= (number or 1) <= len(phases):
        where = config.phases or "a run without --phases"
        raise ValueError(f"--phase must be one of 1 to {len(phases)}: got {number}, {where}: use --phase {len(phases)}")
    return phases[(number or 1) - 1]
