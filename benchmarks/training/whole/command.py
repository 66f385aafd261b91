"""`python -m benchmarks.run run`: a run with all that people switch on, beside its bare steps.

On is the program as users start it, with evaluation, checkpoints, metrics, TensorBoard and the progress line. Off are
the steps of a trainer and nothing else (bare.py). Both are started anew each time, in turns, on ranks that are
processes of this host. Evaluation's own time, which the rows tell, is taken off; everything else is in the wall time
between rows. The losses must be the same bits: what is switched on changes no step.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.harness.rows import make_row, stored
from benchmarks.harness.timing import PASSED, Spread, interleave, paired_ratios, spread_fields
from benchmarks.training.whole.bare import WARMUP_STEPS
from tpengine.config import validate
from tpengine.config.presets import PRESETS


@dataclass(frozen=True)
class Options:
    """A run with everything on, beside its bare steps."""

    preset: str = "tiny"
    """Model and batch."""
    ranks: int = 1
    """Processes."""
    steps: int = 60
    """Steps of each start, of which the first five are not timed."""
    every: int = 20
    """Steps between evaluations, and between checkpoints: in life both are rarer."""
    rounds: int = 4
    """Starts of each kind."""
    out: Path | None = None
    """Append one JSON line to this file."""


@dataclass
class Measured:
    """What the starts of one kind gave.

    Attributes:
        losses: of each step, the same in all starts.
        evaluation_seconds: what was taken off, by start.
    """

    losses: list[float]
    evaluation_seconds: list[float]


def main(options: Options) -> int:
    """Run both kinds in turns, print the table, store a row; return the exit code."""
    console = Console()
    on, off = Measured([], []), Measured([], [])
    seconds: dict[str, tuple[float, ...]] = {}
    with tempfile.TemporaryDirectory(prefix="whole-run-") as directory:
        place = Path(directory)
        variants = {"off": partial(_bare, options, place, off), "on": partial(_whole, options, place, on)}
        seconds = interleave(variants, rounds=options.rounds)
    check = PASSED if on.losses == off.losses else "failed: other losses than those of the bare steps"
    row = _row(options, check, seconds, on)
    console.print(table(row))
    return stored([row], options.out)


def _row(options: Options, check: str, seconds: dict[str, tuple[float, ...]], on: Measured) -> dict[str, Any]:
    config = validate(PRESETS[options.preset](), options.ranks)
    train = config.train
    tokens = train.micro_batch_size * train.seq_len * train.num_micro_batches * (config.parallel.dp or 1)
    timed = tokens * (options.steps - WARMUP_STEPS)
    fields: dict[str, Any] = {
        "check": check,
        "preset": options.preset,
        "ranks": options.ranks,
        "steps": options.steps - WARMUP_STEPS,
        "every": options.every,
        "num_samples": options.rounds,
    }
    if check == PASSED:
        for kind, samples in seconds.items():
            fields |= spread_fields(kind, "tokens_per_second", Spread.of([timed / sample for sample in samples]))
        fields |= spread_fields("on_over_off", "ratio", Spread.of(paired_ratios(seconds["off"], seconds["on"])))
        fields |= spread_fields("evaluation", "seconds", Spread.of(on.evaluation_seconds))
    return make_row(f"run/{options.preset}/{options.ranks}", threads_per_rank=1, fields=fields)


def table(row: dict[str, Any]) -> Table:
    """Return the table; a red check shows its reason and no number."""
    shown = Table(title="tokens/s over wall time, without evaluation's own; ratios within a round", box=box.SIMPLE)
    for name in ("run", "all off", "all on", "on / off", "p20 to p80"):
        shown.add_column(name, justify="right", no_wrap=True)
    numbers = [row["check"]]
    if row["check"] == PASSED:
        numbers = [
            f"{row['off_median_tokens_per_second']:,.0f}",
            f"{row['on_median_tokens_per_second']:,.0f}",
            f"{row['on_over_off_median_ratio']:.3f}",
            f"{row['on_over_off_p20_ratio']:.3f} to {row['on_over_off_p80_ratio']:.3f}",
        ]
    shown.add_row(row["case"], *numbers)
    return shown


def _whole(options: Options, place: Path, measured: Measured) -> float:
    """Start the program with everything on; return the seconds of its timed steps, without evaluation's."""
    run_dir = Path(tempfile.mkdtemp(dir=place))
    every = ("--train.eval-every", str(options.every), "--train.checkpoint-every", str(options.every))
    _start(options, "tpengine.train", *every, "--train.sample-tokens", "0", "--run-dir", str(run_dir))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    _note_losses(measured, [row["loss"] for row in rows])
    # The wall time of a row has the evaluation that followed the row before.
    evaluation = sum(row.get("evaluation_seconds", 0.0) for row in rows[WARMUP_STEPS - 1 : -1])
    measured.evaluation_seconds.append(evaluation)
    wall: float = sum(row["wall_seconds"] for row in rows[WARMUP_STEPS:])
    return wall - evaluation


def _bare(options: Options, place: Path, measured: Measured) -> float:
    """Start the bare steps; return the seconds of the timed ones."""
    run_dir = Path(tempfile.mkdtemp(dir=place))
    _start(options, "benchmarks.training.whole.bare", "--run-dir", str(run_dir))
    found = json.loads((run_dir / "bare.json").read_text())
    _note_losses(measured, found["losses"])
    return float(found["seconds"])


def _note_losses(measured: Measured, losses: list[float]) -> None:
    measured.losses = measured.losses or losses
    if measured.losses != losses:
        measured.losses = []


def _start(options: Options, module: str, *arguments: str) -> None:
    """Run a module on all ranks.

    Raises: ValueError: a rank has failed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = {"WORLD_SIZE": str(options.ranks), "LOCAL_WORLD_SIZE": str(options.ranks)}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    flags = ("--preset", options.preset, "--train.steps", str(options.steps), "--device", "cpu", *arguments)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *flags],
            env={**os.environ, **size, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(options.ranks)
    ]
    try:
        ends = [(process.communicate()[1], process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for errors, code in ends:
        if code:
            raise ValueError(f"{module} must run: exit code {code}: {' '.join(errors.split())[-300:]}")
