"""`tpengine checkpoint ls|verify|diff`: look at the checkpoints of a run, whatever layout wrote them.

ls shows what the indices say; no tensor is read. verify compares every file with the hash that was taken when it was
written: loading stops at the first damage, here all of it is named. No torch before diff compares (checkpoint_diff.py).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpengine.architectures.model_path import run_of
from tpengine.checkpoint.directory import CheckpointDirectory
from tpengine.checkpoint.index import (
    CheckpointError,
    DamagedCheckpoint,
    Index,
    check_file,
    read_index,
    read_index_alone,
)
from tpengine.checkpoint.resume import checkpoints_of
from tpengine.commands.parsing import stoppable

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
    from tpengine.commands.checkpoint_diff import compare

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


@dataclass(frozen=True)
class Listed:
    """A checkpoint, or what is left of one.

    Attributes:
        name: of its directory.
        state: "complete", "damaged" or "incomplete" (being written, or left by a killed run).
        age_seconds: since it was last written to.
        step, phase, held_out_loss, num_bytes, layout: of a complete one; None where the index does not say.
    """

    name: str
    state: str
    age_seconds: float
    step: int | None = None
    phase: int | None = None
    held_out_loss: float | None = None
    num_bytes: int | None = None
    layout: str | None = None

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table; a dash where nothing is known."""
        loss = "-" if self.held_out_loss is None else f"{self.held_out_loss:.4f}"
        size = "-" if self.num_bytes is None else f"{self.num_bytes / 1e9:.3f} GB"
        step = self.name if self.step is None else str(self.step)
        phase = "-" if self.phase is None else str(self.phase)
        return step, phase, loss, size, self.layout or "-", self.state, _age(self.age_seconds)


def list_checkpoints(checkpoints: CheckpointDirectory) -> list[Listed]:
    """Return the checkpoints of a run, oldest step first, then what is damaged or incomplete.

    A checkpoint whose index is damaged, or a file of which is missing or cut, is listed as damaged. Hashes are left to
    `verify`. What a running training renames or removes meanwhile is left out.
    """
    found = [_complete(checkpoints.of_step(step), step) for step in checkpoints.steps()]
    for path in checkpoints.unusable():
        state = "damaged" if ".damaged" in path.name else "incomplete"
        found.append(_listed(path, state))
    return [row for row in found if row is not None]


def _complete(path: Path, step: int) -> Listed | None:
    try:
        index = read_index(path)
    except CheckpointError:
        return _listed(path, "damaged", step=step)
    config, data = _object(index.state, "config"), _object(index.state, "data")
    parallel = _object(config, "parallel")
    axes = ("dp", "tp", "pp", *(("ep",) if parallel.get("ep") not in (None, 1) else ()))
    phase, loss = data.get("phase"), index.state.get("held_out_loss")
    return _listed(
        path,
        "complete",
        step=step,
        # Counted from 1, as in all that is printed.
        phase=phase + 1 if config.get("phases") and isinstance(phase, int) else None,
        held_out_loss=loss if isinstance(loss, float) else None,
        num_bytes=sum(entry.num_bytes for entry in index.files.values()),
        layout=" ".join(f"{axis} {parallel[axis]}" for axis in axes if parallel.get(axis)) or None,
    )


def _listed(path: Path, state: str, **known: Any) -> Listed | None:
    try:
        written = path.stat().st_mtime
    except FileNotFoundError:
        return None
    return Listed(path.name, state, max(0.0, time.time() - written), **known)


def _object(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = state.get(name)
    return value if isinstance(value, dict) else {}


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


@dataclass(frozen=True)
class Verified:
    """A checkpoint that was looked at: what is damaged, a line for each file, and how much was to be read."""

    damage: list[str]
    num_files: int = 0
    num_bytes: int = 0


def verify(directory: Path) -> Verified:
    """Hash all files of a checkpoint.

    Raises:
        CheckpointError: of another version, or this user may not read it: neither whole nor damaged.

    Cost: every file is read once.
    """
    try:
        index = read_index_alone(directory)
    except DamagedCheckpoint as error:
        return Verified([str(error)])
    damage = []
    for name, entry in sorted(index.files.items()):
        try:
            check_file(directory, name, entry)
        except DamagedCheckpoint as error:
            damage.append(f"{error} ({_num_tensors(index, name)} tensors have a piece in it)")
    return Verified(damage, len(index.files), sum(entry.num_bytes for entry in index.files.values()))


def _num_tensors(index: Index, file: str) -> int:
    return sum(any(piece.file == file for piece in entry.pieces) for entry in index.tensors.values())
