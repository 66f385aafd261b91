"""`tpengine plan`: one layout worked out, or a table of published runs predicted row by row. No torch."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tpengine.advice.candidates import Candidate
from tpengine.advice.question import Question
from tpengine.advice.sheets.memory import memory_lines
from tpengine.advice.sheets.sheet import Sheet
from tpengine.advice.words import sheet_json, sheet_lines
from tpengine.commands.planning import plan_table
from tpengine.commands.planning.asked import (
    add_question_arguments,
    lacks_weights,
    phases_of_model,
    question_asked,
    run_command,
)
from tpengine.commands.planning.fixed import fixed_settings, refuse_several
from tpengine.commands.planning.phase_asked import AskedPhase, add_phase_arguments, all_phases, refuse_other_sizes
from tpengine.config.nearest import divisors, nearest_of
from tpengine.config.rules import ZERO_OF_SLICED_WEIGHTS
from tpengine.plan import SCHEDULES
from tpengine.simulate.draw import check_place, write_beside


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `tpengine plan` understands."""
    add_question_arguments(parser)
    parser.add_argument("--explain-memory", action="store_true", help="print formulas of memory, numbers put in")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the sheet to FILE, one for each phase")
    add_phase_arguments(parser, number=False)
    plan_table.add_arguments(parser)


def print_plan(args: argparse.Namespace) -> None:
    """Print one layout's sheet, or predict a table.

    Raises:
        ValueError: a layout that no run accepts: the rule, the values, the nearest choice.
    """
    if args.table is not None or args.out is not None:
        plan_table.print_table(args)
        return
    refuse_several(fixed_settings(args), "tpengine plan")
    if args.json:
        check_place(args.json)
    if args.ranks is None and all(getattr(args, axis) for axis in ("tp", "pp", "dp")):
        args.ranks = args.tp[0] * args.pp[0] * args.dp[0]
    question, name = question_asked(args)
    layout = _layout(question)
    batch = f"{question.global_batch:,} x {question.base.train.seq_len:,} tokens"
    lines = [f"{name}, {question.num_ranks} x {question.machine.name}, {batch}: {layout.words()}"]
    sheets: list[dict[str, Any]] = []
    asked = all_phases(layout.config(question), args)
    _refuse_other_sizes(asked[0], args)
    for phase in asked:
        sheet = Sheet.of(phase.config, question.machine, balanced_for=phase.balanced_for)
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


def _refuse_other_sizes(first: AskedPhase, args: argparse.Namespace) -> None:
    """Raise for sizes that are not those of the first phase."""
    train, dp = first.config.train, first.config.parallel.dp or 1
    asked = {"--seq-len": args.seq_len, "--micro-batch": args.micro_batch_size, "--global-batch": args.global_batch}
    batch = train.micro_batch_size * train.num_micro_batches * dp
    sizes = {"--seq-len": train.seq_len, "--micro-batch": train.micro_batch_size, "--global-batch": batch}
    refuse_other_sizes(first, asked, sizes)


def _phase_flags(args: argparse.Namespace, question: Question, asked: Sequence[AskedPhase]) -> str:
    """Return the options that give a run its phases; N where the user must say how many steps it has."""
    if args.phases is not None:
        steps = "N" if asked[-1].is_open else args.steps
        return f" --phases {shlex.quote(str(args.phases))}" + (f" --train.steps {steps}" if steps else "")
    return phases_of_model(args, question, asked[-1].config.train.steps)


def _layout(question: Question) -> Candidate:
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
