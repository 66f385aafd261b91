"""Visits of layouts: some steps of each, while the machine is as fast as when its file was measured.

A machine that others share is now and then slower, for seconds or minutes, and no prediction can know when. So three
products of the machine's file are multiplied before and after each step. A step counts if both times the machine was as
fast as the file says; whether it agrees with its prediction plays no part. A layout is visited until a step counts, or
the time is up. What did not count is kept in the journal and in the rows too.

Whatever is found is in the journal at once, under the hash of the predictions: the same command goes on.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.journal import append, read
from benchmarks.harness.timing import rotation
from benchmarks.planner.blind.predictions import Prediction
from tpengine.config import Config
from tpengine.distributed.local_ranks import Ranks, RanksFailed
from tpengine.doctor.measure.sizes import sizes_of
from tpengine.dtypes import dtype_bytes
from tpengine.planner.machine import Machine

PREDICTIONS, _JOURNAL = "predictions.json", "journal.jsonl"
# Between two looks at a machine that is slower than its file.
_SECONDS_BETWEEN_LOOKS = 2.0


@dataclass(frozen=True)
class Asked:
    """What is measured.

    Attributes:
        directory: of predictions and journal.
        num_ranks, device: that run layouts.
        repeats: visits of each layout, in rounds over all.
        steps: of a visit.
        still: a step counts if the machine's speed differs by at most this share from its file's.
        is_counted: whether each layout also runs a step whose bytes are counted.
        minutes: when to stop.
    """

    directory: Path
    num_ranks: int
    device: Literal["cpu", "cuda"]
    repeats: int
    steps: int
    still: float
    is_counted: bool
    minutes: float


@dataclass(frozen=True)
class Step:
    """A step of a layout.

    Attributes:
        layout: its name.
        seconds: of the step.
        speeds: how fast the machine was before and after: 1 as when its file was measured, 0.5 half as fast.
    """

    layout: str
    seconds: float
    speeds: tuple[float, float]

    def counts(self, still: float) -> bool:
        """Return whether the machine was as fast as its file says, before and after."""
        return all(abs(speed - 1) <= still for speed in self.speeds)


def measured(
    asked: Asked, machine: Machine, predictions: Sequence[Prediction], digest: str
) -> tuple[list[Step], dict[str, Sequence[int]]]:
    """Measure what the journal lacks; return all steps, and by layout the bytes that its pipeline ranks held.

    Args:
        asked: what is measured.
        machine: of the file that has predicted.
        predictions: of all layouts.
        digest: of these.
    """
    journal, end = asked.directory / _JOURNAL, time.monotonic() + 60 * asked.minutes
    # Visits that were noted before the machine's speed was, have none: they are left out.
    rows = [row for row in read(journal) if row["predictions"] == digest and ("seconds" not in row or "speeds" in row)]
    wanted = _wanted(asked, predictions, rows)
    counted = {row["layout"] for row in rows if "peak_bytes" in row}
    uncounted = [of for of in predictions if asked.is_counted and of.name not in counted]
    if wanted or uncounted:
        file = reference_by_file(machine, asked.device, predictions[0].config.train.dtype)
        try:
            with Ranks(asked.num_ranks, "benchmarks.planner.blind.rank:Member") as ranks:
                for row in _found(asked, ranks, wanted, uncounted, file, end):
                    # Above the number of ranks something else computes too.
                    row |= {"predictions": digest, "load": os.getloadavg()[0]}
                    append(journal, row)
                    rows.append(row)
        except RanksFailed as error:
            # What was measured before is told.
            print(error, flush=True)
        if time.monotonic() > end:
            print("time is up: the same command goes on", flush=True)
    steps = [
        Step(row["layout"], seconds, (before, after))
        for row in rows
        if "seconds" in row
        for seconds, (before, after) in zip(row["seconds"], itertools.pairwise(row["speeds"]), strict=True)
    ]
    return steps, {row["layout"]: row["peak_bytes"] for row in rows if "peak_bytes" in row}


def _wanted(
    asked: Asked, predictions: Sequence[Prediction], rows: Sequence[Mapping[str, Any]]
) -> deque[tuple[Prediction, int]]:
    """Return the visits, (layout, round), without a step that counts."""
    by_name = {of.name: of for of in predictions}
    done = {(row["layout"], row["round"]) for row in rows if "seconds" in row and _suffices(asked, row)}
    rounds = [
        (name, round_)
        for round_ in range(asked.repeats)
        for name in rotation(list(by_name), round_ * len(by_name) // asked.repeats)
    ]
    return deque((by_name[name], round_) for name, round_ in rounds if (name, round_) not in done)


def _found(
    asked: Asked,
    ranks: Ranks,
    wanted: deque[tuple[Prediction, int]],
    uncounted: Sequence[Prediction],
    file: Sequence[float],
    end: float,
) -> Iterator[dict[str, Any]]:
    """Yield a row of each visit until the time is up: bytes last."""
    while wanted and _is_still(asked, ranks, wanted[0][0].config, file, end):
        of, round_ = wanted.popleft()
        row = {"layout": of.name, "round": round_} | _visit(ranks, of.config, asked.steps, file)
        if not _suffices(asked, row):
            wanted.append((of, round_))
        yield row
    for of in uncounted:
        if time.monotonic() > end:
            break
        yield {"layout": of.name, "peak_bytes": _peaks(ranks, of.config)}


def _is_still(asked: Asked, ranks: Ranks, config: Config, file: Sequence[float], end: float) -> bool:
    """Wait until the machine is as fast as its file says, and say so; return False if the time is up before."""
    waits = False
    while time.monotonic() <= end:
        speed = _speed(ranks, config, file)
        if abs(speed - 1) <= asked.still:
            return True
        if not waits:
            waits = True
            print(
                f"products are {speed:.2f} times as fast as by the machine's file: waiting until that is within "
                f"{asked.still:.0%} (--still); a machine that stays so needs a file of its own",
                flush=True,
            )
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return False


def _visit(ranks: Ranks, config: Config, steps: int, file: Sequence[float]) -> dict[str, Any]:
    """Return what some steps took, and how fast the machine was before, between and after them."""
    ranks.call("build", config)
    seconds, speeds = [], [_speed(ranks, config, file)]
    for _ in range(steps):
        seconds.append(max(ranks.call("step")))
        speeds.append(_speed(ranks, config, file))
    return {"seconds": seconds, "speeds": speeds}


def _suffices(asked: Asked, row: Mapping[str, Any]) -> bool:
    """Return whether a step of the visit counts."""
    speeds = row["speeds"]
    return any(Step("", 0.0, sides).counts(asked.still) for sides in itertools.pairwise(speeds))


def _speed(ranks: Ranks, config: Config, file: Sequence[float]) -> float:
    return machine_speed(ranks.call("reference", config.device, config.train.dtype), file)


def _peaks(ranks: Ranks, config: Config) -> list[int]:
    """Return the most bytes that each pipeline rank held in a step."""
    held: dict[int, int] = {}
    for rank, num_bytes in ranks.call("peak", config):
        held[rank] = max(held.get(rank, 0), num_bytes)
    return [held[rank] for rank in sorted(held)]


def reference_by_file(machine: Machine, device: str, dtype: str) -> list[float]:
    """Return the seconds of the products of reference as the machine's file says, in the dtype of the runs."""
    references = sizes_of(device).references
    return [machine.product_seconds(*sizes, dtype_bytes(dtype), dtype, kind="forward") for sizes in references]


def machine_speed(answers: Sequence[Sequence[float]], file: Sequence[float]) -> float:
    """Return how fast the machine is: 1 as when its file was measured, 0.5 half as fast.

    Args:
        answers: of each rank, seconds of the products of reference.
        file: what the machine's file says of them.
    """
    # Of three products the middle one: one figure of a file, or of a look, may have been disturbed.
    means = [statistics.mean(took) for took in zip(*answers, strict=True)]
    return statistics.median(said / took for said, took in zip(file, means, strict=True))
