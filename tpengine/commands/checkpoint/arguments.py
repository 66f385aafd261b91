"""What `tpengine checkpoint` understands. No torch before `diff` compares."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tpengine.architectures.model_path import run_of
from tpengine.checkpoint.run.resume import checkpoints_of
from tpengine.commands.checkpoint.listing import list_checkpoints
from tpengine.commands.checkpoint.verify import verify
from tpengine.commands.stopping import stoppable

_RUN = "directory of a run; RUN@STEP for one of its checkpoints"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command understands."""
    verbs = parser.add_subparsers(required=True, metavar="ls|verify|diff")
    ls = verbs.add_parser("ls", help="step, phase, held-out loss, size, layout, state and age of each checkpoint")
    ls.add_argument("run_dir", metavar="RUN", help="directory of a run")
    ls.set_defaults(verb=_ls)
    check = verbs.add_parser("verify", help="hash every file; exit code 1 if one is missing, cut or altered")
    check.add_argument("run_dir", metavar="RUN", help=_RUN)
    check.set_defaults(verb=_verify)
    diff = verbs.add_parser("diff", help="compare weights and moments bit by bit; exit code 1 if any differs")
    diff.add_argument("a", metavar="A", help=f"{_RUN}, else its newest")
    diff.add_argument("b", metavar="B", help="the same")
    diff.set_defaults(verb=_diff)
    for verb in (ls, check, diff):
        verb.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run_checkpoint(args: argparse.Namespace) -> int:
    """List, verify or compare checkpoints; returns 1 for damage or a difference."""
    with stoppable():
        code: int = args.verb(args)
    return code


def _ls(args: argparse.Namespace) -> int:
    run, step = _run(args.run_dir)
    if step is not None:
        raise ValueError(f"checkpoint ls lists a whole run: got {args.run_dir}: use {run}")
    found = list_checkpoints(checkpoints_of(run))
    if args.json:
        print(json.dumps({"checkpoints": [asdict(row) for row in found]}))
        return 0
    head = ("step", "phase", "held-out loss", "size", "layout", "state", "age")
    _print_table(head, [row.cells() for row in found], f"{run} has no checkpoints")
    return 0


def _verify(args: argparse.Namespace) -> int:
    run, step = _run(args.run_dir)
    checkpoints = checkpoints_of(run)
    steps = [_existing(args.run_dir)[1]] if step is not None else checkpoints.steps()
    if not steps:
        raise ValueError(f"checkpoint verify needs a checkpoint: {run} has none: use another run")
    results = {number: verify(checkpoints.of_step(number)) for number in steps}
    if args.json:
        print(json.dumps({"damage": {number: found.damage for number, found in results.items()}}))
    else:
        for number, found in results.items():
            said = f"whole: {found.num_files} files, {found.num_bytes / 1e9:.3f} GB" if not found.damage else "DAMAGED"
            print("\n  ".join([f"step {number}: {said}", *found.damage]))
    return int(any(found.damage for found in results.values()))


def _diff(args: argparse.Namespace) -> int:
    directories = [checkpoints_of(run).of_step(step) for run, step in map(_existing, (args.a, args.b))]
    from tpengine.commands.checkpoint.diff import compare

    num_tensors, differing = compare(*directories)
    if args.json:
        print(json.dumps({"tensors": num_tensors, "differing": [asdict(row) for row in differing]}))
        return int(bool(differing))
    head = ("tensor", "elements that differ", "of", "largest in ulps", "largest in value")
    _print_table(head, [row.cells() for row in differing], f"identical: {num_tensors} tensors, every bit")
    if differing:
        print(f"{len(differing)} of {num_tensors} tensors differ: {directories[0]} against {directories[1]}")
    return int(bool(differing))


def _run(path: str) -> tuple[Path, int | None]:
    if (found := run_of(path)) is None:
        raise ValueError(f"RUN must be the directory of a run: {path} has no config.toml: check the path")
    return found


def _existing(path: str) -> tuple[Path, int]:
    """Return the run and the step that RUN or RUN@STEP names; a run's newest checkpoint by default."""
    run, step = _run(path)
    steps = checkpoints_of(run).steps()
    if not steps or (step is not None and step not in steps):
        wanted = "a checkpoint" if step is None else f"that of step {step}"
        raise ValueError(
            f"RUN@STEP names a checkpoint: {run} has those of steps {', '.join(map(str, steps)) or 'none'}, not "
            f"{wanted}: use one of them"
        )
    return run, steps[-1] if step is None else step


def _print_table(head: Sequence[str], rows: Sequence[Sequence[Any]], empty: str) -> None:
    """Print rows under their heads, the first column to the left, the others to the right."""
    if not rows:
        print(empty)
        return
    lines = [list(map(str, row)) for row in (head, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        cells = [line[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(line[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip())
