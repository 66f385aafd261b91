"""`tpengine plan`: one layout worked out. No torch."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tpengine.commands.parsing import Removed
from tpengine.commands.planning.asked import (
    add_question_arguments,
    lacks_weights,
    phases_of_model,
    question_asked,
    run_command,
)
from tpengine.commands.planning.fixed import fixed_settings, refuse_several
from tpengine.commands.planning.layout_asked import layout_asked
from tpengine.commands.planning.phase_asked import AskedPhase, add_phase_arguments, all_phases, refuse_other_sizes
from tpengine.planner.advice.question import Question
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


def _phase_flags(args: argparse.Namespace, question: Question, asked: Sequence[AskedPhase]) -> str:
    """Return the options that give a run its phases; N where the user must say how many steps it has."""
    if args.phases is not None:
        steps = "N" if asked[-1].is_open else args.steps
        return f" --phases {shlex.quote(str(args.phases))}" + (f" --train.steps {steps}" if steps else "")
    return phases_of_model(args, question, asked[-1].config.train.steps)
