"""`tpengine plan`: one layout worked out, and the phases of a run in it. No torch.

The layout that is asked for and its phases are those of `tpengine schedule`, too, which reads them from here. Each
phase has its own batch, lengths and plan, but all have one split of layers.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from tpengine.commands.parsing import Removed, count
from tpengine.commands.plan_arguments import (
    add_question_arguments,
    fixed_settings,
    flag_of,
    lacks_weights,
    phases_of_model,
    question_asked,
    refuse_several,
    run_command,
)
from tpengine.config import Config, Phase, phases_of, validate_run
from tpengine.config.lengths import MOST_STEPS
from tpengine.config.ranges import divisors, nearest_of
from tpengine.config.rules import ZERO_OF_SLICED_WEIGHTS
from tpengine.layout.step_plan import longest_of
from tpengine.plan import SCHEDULES
from tpengine.planner.advice.question import Candidate, Question
from tpengine.planner.advice.sheets import Sheet, memory_lines
from tpengine.planner.advice.words import sheet_json, sheet_lines
from tpengine.planner.draw import check_place, write_beside


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tpengine plan` understands."""
    add_question_arguments(parser)
    parser.add_argument("--explain-memory", action="store_true", help="print formulas of memory, numbers put in")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the sheet to FILE, one for each phase")
    add_phase_arguments(parser, number=False)
    published = "python -m benchmarks.run published --table FILE --predictions FILE, in a checkout"
    parser.add_argument("--table", action=Removed, new=published)


def print_plan(args: argparse.Namespace) -> None:
    """Print one layout's sheet.

    Raises:
        ValueError: a layout that no run accepts: the rule, the values, the nearest choice.
    """
    refuse_several(fixed_settings(args), "tpengine plan")
    if args.json:
        check_place(args.json)
    if args.ranks is None and all(getattr(args, axis) for axis in ("tp", "pp", "dp")):
        args.ranks = args.tp[0] * args.pp[0] * args.dp[0]
    question, name = question_asked(args)
    layout = layout_asked(question)
    batch = f"{question.global_batch:,} x {question.base.train.seq_len:,} tokens"
    lines = [f"{name}, {question.num_ranks} x {question.machine.name}, {batch}: {layout.words()}"]
    sheets: list[dict[str, Any]] = []
    asked = all_phases(layout.config(question), args)
    refuse_other_sizes(asked[0], args)
    for phase in asked:
        sheet = Sheet.of(phase.config, question.machine, balanced_for=phase.balanced_for, load=question.load)
        lines += [*filter(None, [phase.words]), *sheet_lines(sheet, question)]
        if args.explain_memory:
            lines += memory_lines(sheet)
        sheets.append(sheet_json(sheet))
    fits, limit = max(sheet["peak_bytes"] for sheet in sheets) <= question.memory_limit, question.memory_limit
    run = f"{run_command(args, question)} {layout.flags(question)}{_phase_flags(args, question, asked)}"
    if fits:
        lines += filter(None, [f"run it: {run}", lacks_weights(args)])
    else:
        lines.append("it does not fit, so no command: tpengine advise looks for layouts that do")
    if args.json:
        asked_for: dict[str, Any] = {
            "model": name,
            "machine": question.machine.name,
            "ranks": question.num_ranks,
            "layout": asdict(layout),
            "run": run if fits else None,
            "memory_limit_bytes": limit if limit < math.inf else None,
            "fits": fits,
        }
        found = asked_for | ({"phases": sheets} if len(sheets) > 1 else sheets[0])
        write_beside(args.json, (json.dumps(found, indent=2) + "\n").encode())
        lines.append(f"wrote {args.json}")
    print("\n".join(lines))


def _phase_flags(args: argparse.Namespace, question: Question, asked: Sequence[AskedPhase]) -> str:
    """Return the options that give a run its phases; N where the user must say how many steps it has."""
    if args.phases is not None:
        steps = "N" if asked[-1].is_open else args.steps
        return f" --phases {shlex.quote(str(args.phases))}" + (f" --train.steps {steps}" if steps else "")
    return phases_of_model(args, question, asked[-1].config.train.steps)


def layout_asked(question: Question) -> Candidate:
    """Return the layout that is asked for; what is not said is as the command that is printed would run it.

    Raises:
        ValueError: sizes that do not divide, a setting that says nothing of this layout.
    """
    fixed, kept = question.fixed, question.kept
    tp, pp, dp = _axes(question)
    size = fixed.get("micro_batch_size") or _micro_batch_size(question, dp)
    number, rest = divmod(question.global_batch, dp * size)
    if rest or not number:
        near = max(1, round(question.global_batch / (dp * size))) * dp * size
        raise ValueError(
            f"the global batch must be divisible by dp and the sequences of a micro-batch: {question.global_batch}, "
            f"dp {dp}, {size} per micro-batch: use --global-batch {near}"
        )
    schedule = fixed.get("schedule", kept.schedule)
    zero = fixed.get("zero", kept.zero)
    form = SCHEDULES.get(schedule)
    chunks = (form.num_chunks if form else 1) or fixed.get("chunks_per_rank", kept.chunks_per_rank)
    if fixed.get("chunks_per_rank", chunks) != chunks:
        raise ValueError(
            f"chunks per rank are of the interleaved schedule: got {fixed['chunks_per_rank']} of {schedule}, which has "
            f"{chunks}: use --schedule interleaved, or leave --chunks out"
        )
    if "residency" in fixed and zero != ZERO_OF_SLICED_WEIGHTS:
        raise ValueError(
            f"a residency is of weights at zero {ZERO_OF_SLICED_WEIGHTS}: got {fixed['residency']} at zero {zero}: use "
            f"--zero {ZERO_OF_SLICED_WEIGHTS}, or leave --residency out"
        )
    return Candidate(
        tp=tp,
        pp=pp,
        dp=dp,
        schedule=schedule,
        chunks_per_rank=chunks,
        micro_batch_size=size,
        num_micro_batches=number,
        zero=zero,
        residency=fixed.get("residency", "step" if kept.residency == "auto" else kept.residency),
        recompute=fixed.get("recompute", kept.recompute),
        gathered=fixed.get("gathered", kept.gathered),
        tp_comm=fixed.get("tp_comm", kept.tp_comm),
        bucket_bytes=fixed.get("bucket_bytes", 0),
        ep=fixed.get("ep", kept.ep),
    )


def _axes(question: Question) -> tuple[int, int, int]:
    """Return tp, pp and dp: those of the run that goes on, if it has as many ranks and none is asked for."""
    fixed, kept, heads = question.fixed, question.kept, question.base.model.num_heads
    sizes = kept.tp or 1, kept.pp or 1, kept.dp or 1
    if not {"tp", "pp", "dp"} & fixed.keys() and math.prod(sizes) == question.num_ranks:
        return sizes
    tp, pp = fixed.get("tp", 1), fixed.get("pp", 1)
    if heads % tp:
        raise ValueError(
            f"the model's heads must be divisible by tp: {heads} heads, tp {tp}: use "
            f"{nearest_of('--tp', tp, divisors(heads))}"
        )
    dp = fixed.get("dp", max(1, question.num_ranks // (tp * pp)))
    if tp * pp * dp != question.num_ranks:
        raise ValueError(
            f"tp*pp*dp must equal the number of ranks: tp {tp} pp {pp} dp {dp}, ranks {question.num_ranks}: use "
            f"--ranks {tp * pp * dp}, or axes that divide {question.num_ranks}"
        )
    return tp, pp, dp


def _micro_batch_size(question: Question, dp: int) -> int:
    """Return the run's or preset's micro-batch, or the next smaller one that divides a replica's sequences."""
    per_replica = max(1, question.global_batch // dp)
    most = min(question.base.train.micro_batch_size, per_replica)
    return next(size for size in range(most, 0, -1) if per_replica % size == 0)


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
