"""`python -m benchmarks.run blind --machine m.toml --dir DIR`: are the steps right that advise predicts here?

1. Every layout's step is predicted, by the plan and the simulation that `tpengine advise` prints, for a preset and for
   a model drawn at run time. The predictions are written to DIR/predictions.json, and the file's SHA-256 is printed.
2. Then the layouts run, in rounds, in processes that stay up. Each visit is in DIR/journal.jsonl at once, under the
   predictions' hash: the same command goes on where it was interrupted.
3. What each rank holds at most is counted in a step of its own, which nobody times.
4. The table: predicted / measured, the layout's own spread; median and worst error; regret.

A machine that others share is now and then slower than when its file was measured. A step counts if the machine was as
fast as its file says, by products that are multiplied before and after it; see visits.py. What all steps say, those too
that do not count, stands beside it.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from benchmarks.harness.rows import stored
from benchmarks.planner.blind.predictions import drawn_model, fits, predicted, written
from benchmarks.planner.blind.verdict import machine_varied, row_of, table, verdict
from benchmarks.planner.blind.visits import PREDICTIONS, Asked, Step, measured
from tpengine.config import Config
from tpengine.config.presets import preset_config
from tpengine.planner.machine import Machine, machine_named


@dataclass(frozen=True)
class Options:
    """Predict steps of many layouts, then measure them."""

    machine: str = "cpu"
    """The machine's file, of `benchmarks.run machine`."""
    dir: Path = Path("blind")
    """Predictions and journal; the same directory goes on."""
    preset: str = "bench"
    """Model of the first half."""
    ranks: int = 2
    """Processes: 2 on a CPU; 1 takes layouts of one rank."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the ranks compute; on cuda with --ranks 1."""
    global_batch: int = 16
    """Sequences of a step."""
    seq_len: int = 128
    """Tokens of a sequence."""
    layouts: int | None = None
    """So many layouts of each model, evenly over all; default all."""
    repeats: int = 3
    """Rounds over all layouts."""
    steps: int = 2
    """Steps of a layout in a round."""
    still: float = 0.1
    """A step counts if the machine's speed differs by less from its file's."""
    memory: bool = True
    """Also count what each rank holds at most, in a step of its own."""
    minutes: float = 60.0
    """When to stop measuring; what was measured by then is told."""
    seed: int | None = None
    """Of the drawn model; default drawn."""
    drawn: bool = True
    """Also take a drawn model."""
    out: Path | None = None
    """Append one JSON line per layout; results to keep go to benchmarks/results."""


def main(options: Options) -> int:
    """Predict, measure, tell; return 0.

    Raises:
        ValueError: an unknown machine, preset or layout; a directory of other predictions.
    """
    return stored(proof(options, machine_named(options.machine), Path(options.machine).name), options.out)


def proof(options: Options, machine: Machine, said_machine: str) -> list[dict[str, Any]]:
    """Predict, measure, print what is found; return a row for each layout with a step that counts.

    Args:
        options: all but the machine and where rows go.
        machine: what predicts.
        said_machine: its name in the rows.

    Raises:
        ValueError: an unknown preset or layout; a directory of other predictions.
    """
    options.dir.mkdir(parents=True, exist_ok=True)
    seed = _seed_of(options)
    every = predicted(machine, _models(options, seed), options.ranks, options.global_batch, options.layouts)
    predictions = [of for of in every if fits(of, machine)]
    digest = written(options.dir / PREDICTIONS, predictions, seed)
    print(f"{len(predictions)} layouts predicted: {options.dir / PREDICTIONS}, SHA-256 {digest}", flush=True)
    asked = Asked(
        options.dir,
        options.ranks,
        options.device,
        repeats=options.repeats,
        steps=options.steps,
        still=options.still,
        is_counted=options.memory and options.device == "cpu",
        minutes=options.minutes,
    )
    steps, counted = measured(asked, machine, predictions, digest)
    said = {
        "machine_file": said_machine,
        "device": options.device,
        "global_batch": options.global_batch,
        "seq_len": options.seq_len,
        "predictions_sha256": digest,
    }
    of_layout: dict[str, list[Step]] = {}
    for step in steps:
        of_layout.setdefault(step.layout, []).append(step)
    number = Counter(of.model for of in predictions)
    found = [
        row_of(
            *(of, of_layout.get(of.name, []), options.still, counted.get(of.name)),
            said | {"num_layouts": number[of.model]},
        )
        for of in predictions
    ]
    rows = [row for row in found if row is not None]
    Console(width=170).print(table(rows))
    for line in verdict(rows, number):
        print(line)
    print(machine_varied(steps, options.still))
    return rows


def _models(options: Options, seed: int) -> Mapping[str, Config]:
    """Return the models by name."""
    base = preset_config(options.preset)
    train = replace(base.train, seq_len=options.seq_len, steps=1_000_000)
    models = {options.preset: base.model} | ({f"drawn {seed}": drawn_model(seed)} if options.drawn else {})
    return {name: replace(base, model=model, train=train, device=options.device) for name, model in models.items()}


def _seed_of(options: Options) -> int:
    """Return the seed of the drawn model: of the directory's predictions, where it has some."""
    path = options.dir / PREDICTIONS
    if options.seed is None and path.exists():
        return int(json.loads(path.read_text())["seed"])
    return random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
