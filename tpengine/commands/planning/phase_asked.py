"""Which phase of a run a plan is of: each has its own batch, lengths and plan, but all have one split of layers."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import NamedTuple

from tpengine.commands.parsing import count
from tpengine.commands.planning.fixed import flag_of
from tpengine.config import Config, Phase, phases_of, validate_run
from tpengine.config.lengths import MOST_STEPS
from tpengine.layout.phase_layouts import longest_of


class AskedPhase(NamedTuple):
    """A phase of a run.

    Attributes:
        config: what the phase trains with.
        balanced_for: the sequence length that the run's layers are balanced for; 0 for the configuration's.
        words: which phase it is, of how many; empty for a run of one.
        is_open: whether nothing says where it ends.
    """

    config: Config
    balanced_for: int = 0
    words: str = ""
    is_open: bool = False


def add_phase_arguments(parser: argparse._ActionsContainer, number: bool = True) -> None:
    """Add --phases and --steps, and --phase if one of them is shown."""
    parser.add_argument("--phases", metavar="FILE.toml", help="as in training: the phases of the run")
    parser.add_argument(
        "--steps", type=count, metavar="N", help="where a last phase without `until` ends, as --train.steps in training"
    )
    if number:
        parser.add_argument("--phase", type=count, metavar="N", help="which of them is shown (default 1)")


def all_phases(config: Config, args: argparse.Namespace) -> list[AskedPhase]:
    """Return all phases of a configuration whose layout is given; of one without phases itself.

    A run says how many steps it has. Where phases are given without --steps, a last phase without `until` is open: it
    has as many steps as a run may have, and is the longest. The steps of a preset are those of another run.

    Raises:
        ValueError: the file cannot be read, or a phase is not legal in this layout; --steps beside no open phase.
    """
    if args.phases is not None:
        config = replace(config, phases=args.phases)
    if not config.phases:
        if args.steps is not None:
            raise ValueError(f"--steps is for the phases of a run: got {args.steps}, no --phases: leave --steps out")
        return [AskedPhase(config)]
    steps = args.steps or (config.train.steps if args.phases is None else MOST_STEPS)
    parallel = config.parallel
    sizes = (parallel.tp or 1, parallel.pp or 1, parallel.dp or 1)
    phases = phases_of(validate_run(replace(config, train=replace(config.train, steps=steps)), math.prod(sizes)))
    last = phases[-1]
    if args.steps not in (None, last.end_step):
        raise ValueError(
            f"a run with phases ends with its last one: --steps {args.steps}, {config.phases} ends at step "
            f"{last.end_step}: leave --steps out"
        )
    balanced_for = longest_of(phases).config.train.seq_len
    is_open = last.end_step == MOST_STEPS
    # The split of layers depends on the sequences alone: where all are equal, it does not matter which is the longest.
    is_guessed = is_open and sizes[1] > 1 and any(phase.config.train.seq_len != balanced_for for phase in phases)
    guess = f"; layers are split for phase {len(phases)}, taken for the longest: --steps N says how long it is"
    return [
        AskedPhase(
            phase.config,
            balanced_for,
            f"phase {phase.number + 1} of {len(phases)}, {_steps_in_words(phase)}: "
            f"{phase.config.train.num_micro_batches} micro-batches of {phase.config.train.micro_batch_size} x "
            f"{phase.config.train.seq_len} tokens per replica{guess if is_guessed else ''}",
            is_open and phase is last,
        )
        for phase in phases
    ]


def refuse_other_sizes(phase: AskedPhase, args: argparse.Namespace) -> None:
    """Raise for an option that a phase's file overrides.

    Args:
        phase: that is shown.
        args: the options, each None if it was not given.

    Raises:
        ValueError: the first that differs, in one line.
    """
    train = phase.config.train
    sizes = {
        "seq_len": train.seq_len,
        "micro_batch_size": train.micro_batch_size,
        "micro_batches": train.num_micro_batches,
        "global_batch": train.micro_batch_size * train.num_micro_batches * (phase.config.parallel.dp or 1),
    }
    for name, has in sizes.items():
        value = getattr(args, name, None)
        if value not in (None, has, (has,)):
            said, option = value[0] if isinstance(value, tuple) else value, flag_of(name)
            raise ValueError(
                f"a phase says its own sizes: {phase.config.phases}, {phase.words}: got {option} {said}, it has "
                f"{has}: leave {option} out"
            )


def _steps_in_words(phase: Phase) -> str:
    return f"steps {phase.first_step + 1} {'on' if phase.end_step == MOST_STEPS else f'to {phase.end_step}'}"


def phase_asked(config: Config, args: argparse.Namespace) -> AskedPhase:
    """Return one phase of a configuration, by default the first.

    Raises:
        ValueError: as all_phases; there is no such phase.
    """
    phases, number = all_phases(config, args), args.phase
    if not 1 <= (number or 1) <= len(phases):
        where = args.phases or config.phases or "a run without --phases"
        raise ValueError(f"--phase must be one of 1 to {len(phases)}: got {number}, {where}: use --phase {len(phases)}")
    return phases[(number or 1) - 1]
