"""`python -m benchmarks.run blind --machine m.toml --dir DIR`: are the steps right that advise predicts here?

1. Every layout's step is predicted, by the plan and the simulation that `tpengine advise` prints, for a preset and for
   a model drawn at run time. The predictions are written to DIR/predictions.json, and the file's SHA-256 is printed.
2. Then the layouts run, in rounds, in processes that stay up. Each visit is in DIR/journal.jsonl at once, under the
   predictions' hash: the same command goes on where it was interrupted.
3. What each rank holds at most is counted in a step of its own, which nobody times.
4. The table: predicted / measured, the layout's own spread; median and worst error; regret. A machine that others
   share is not always as fast as when its file was measured: each visit also times three products of the file, and
   beside each ratio stands the one that remains when steps are scaled by what those products take at their visit.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from benchmarks.harness.journal import append, read
from benchmarks.harness.rows import stored
from benchmarks.harness.timing import rotation
from benchmarks.machine.predictions import Prediction, drawn_model, predicted, written
from benchmarks.machine.sizes import sizes_of
from benchmarks.machine.verdict import machine_speed, machine_varied, row_of, table, verdict
from tpengine.config import Config
from tpengine.config.presets import preset_config
from tpengine.distributed.local_ranks import Ranks
from tpengine.layout.step_plan import dtype_bytes
from tpengine.simulate.machine import Machine, machine_named

_PREDICTIONS, _JOURNAL = "predictions.json", "journal.jsonl"
# The round of a visit that counts bytes instead of seconds.
_COUNTED = -1


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
    """Steps of a layout in a round that count."""
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
    machine = machine_named(options.machine)
    options.dir.mkdir(parents=True, exist_ok=True)
    seed = _seed_of(options)
    predictions = list(predicted(machine, _models(options, seed), options.ranks, options.global_batch, options.layouts))
    digest = written(options.dir / _PREDICTIONS, predictions, seed)
    print(f"{len(predictions)} layouts predicted: {options.dir / _PREDICTIONS}, SHA-256 {digest}", flush=True)
    visits = _measured(options, predictions, digest)
    timed: dict[str, list[Mapping[str, Any]]] = {}
    for row in visits:
        if "seconds" in row:
            timed.setdefault(row["layout"], []).append(row)
    counted = {row["layout"]: row["peak_bytes"] for row in visits if "peak_bytes" in row}
    file = reference_by_file(machine, options.device, preset_config(options.preset).train.dtype)
    speeds = {
        layout: [machine_speed(of["reference_seconds"], file) for of in visits_of]
        for layout, visits_of in timed.items()
    }
    said = {
        "machine_file": Path(options.machine).name,
        "device": options.device,
        "global_batch": options.global_batch,
        "seq_len": options.seq_len,
        "predictions_sha256": digest,
    }
    rows = [
        row_of(of, [visit["seconds"] for visit in timed[of.name]], speeds[of.name], counted.get(of.name), said)
        for of in predictions
        if sum(len(visit["seconds"]) for visit in timed.get(of.name, [])) >= 2
    ]
    Console(width=170).print(table(rows))
    for line in verdict(rows):
        print(line)
    print(machine_varied([speed for of_layout in speeds.values() for speed in of_layout]))
    return stored(rows, options.out)


def _models(options: Options, seed: int) -> dict[str, Config]:
    """Return the models by name."""
    base = preset_config(options.preset)
    train = replace(base.train, seq_len=options.seq_len, steps=1_000_000)
    models = {options.preset: base.model} | ({f"drawn {seed}": drawn_model(seed)} if options.drawn else {})
    return {name: replace(base, model=model, train=train, device=options.device) for name, model in models.items()}


def _seed_of(options: Options) -> int:
    """Return the seed of the drawn model: of the directory's predictions, where it has some."""
    path = options.dir / _PREDICTIONS
    if options.seed is None and path.exists():
        return int(json.loads(path.read_text())["seed"])
    return random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed


def _measured(options: Options, predictions: Sequence[Prediction], digest: str) -> list[dict[str, Any]]:
    """Measure what the journal lacks; return all visits: a layout's seconds, or the bytes that its ranks held."""
    journal, end = options.dir / _JOURNAL, time.monotonic() + 60 * options.minutes
    by_name = {of.name: of for of in predictions}
    wanted: list[tuple[str, int]] = [
        (name, round_)
        for round_ in range(options.repeats)
        for name in rotation(list(by_name), round_ * len(by_name) // options.repeats)
    ]
    if options.memory and options.device == "cpu":
        wanted += [(name, _COUNTED) for name in by_name]
    visits = [row for row in read(journal) if row["predictions"] == digest]
    done = {(row["layout"], row["round"]) for row in visits}
    left = [visit for visit in wanted if visit not in done]
    if left:
        with Ranks(options.ranks, "benchmarks.machine.blind_rank:Member") as ranks:
            for name, round_ in left:
                if time.monotonic() > end:
                    print("time is up: the same command goes on", flush=True)
                    break
                visit = {"predictions": digest, "layout": name, "round": round_}
                visit |= _visit(ranks, by_name[name].config, options, round_)
                # Above the number of ranks something else computes too.
                append(journal, visit | {"load": os.getloadavg()[0]})
                visits.append(visit)
    return visits


def _visit(ranks: Ranks, config: Config, options: Options, round_: int) -> dict[str, Any]:
    """Return what a visit of a layout has found."""
    if round_ != _COUNTED:
        before = ranks.call("reference", config.device, config.train.dtype)
        answers = ranks.call("steps", config, options.steps)
        after = ranks.call("reference", config.device, config.train.dtype)
        return {
            "seconds": [max(of) for of in zip(*answers, strict=True)],
            "reference_seconds": [_means(before), _means(after)],
        }
    held: dict[int, int] = {}
    for rank, num_bytes in ranks.call("peak", config):
        held[rank] = max(held.get(rank, 0), num_bytes)
    return {"peak_bytes": [held[rank] for rank in sorted(held)]}


def reference_by_file(machine: Machine, device: str, dtype: str) -> list[float]:
    """Return the seconds of the products of reference as the machine's file says, in the dtype of the runs."""
    references = sizes_of(device).references
    return [machine.product_seconds(*sizes, dtype_bytes(dtype), dtype, kind="forward") for sizes in references]


def _means(answers: Sequence[Sequence[float]]) -> list[float]:
    """Return the means over ranks."""
    return [statistics.mean(of) for of in zip(*answers, strict=True)]
