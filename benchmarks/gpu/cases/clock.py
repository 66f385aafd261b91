"""What the cases share: rows, time on a GPU or a CPU and of the host that launches, results that must be the same."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.harness.journal import append
from benchmarks.harness.rows import make_row
from benchmarks.harness.timing import PASSED, Spread, interleave
from benchmarks.kernels.timing import make_clock

_WARM_CALLS = 3
# Of the largest element: what another order of sums, or torch's attention on each run, may change in 16 bits.
_SAME = 2e-2


def device_here() -> torch.device:
    """Return the GPU; the CPU where there is none, for a rehearsal."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def write(rows: Path, case: str, fields: Mapping[str, Any], check: str = PASSED) -> None:
    """Append a row of results."""
    append(rows, make_row(case, threads_per_rank=torch.get_num_threads(), fields={"check": check, **fields}))


def medians(calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, Spread]:
    """Return each call's seconds by the device's clock, with a cold cache, in turns."""
    timers = {}
    for name, call in calls.items():
        clock = make_clock(device.type)
        for _ in range(_WARM_CALLS):
            clock.learn(call)
        timers[name] = lambda clock=clock, call=call: clock.seconds(call)
    return {name: Spread.of(samples) for name, samples in interleave(timers, rounds=rounds).items()}


def host_seconds(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Return the host's seconds per call, which are those of a loop that never waits for the device."""
    for _ in range(_WARM_CALLS):
        call()
    settle(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = (time.perf_counter() - begin) / calls
    settle(device)
    return seconds


def agreement(want: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> str:
    """Return "passed", or which of the results is another one: a check of what is timed, not of a kernel."""
    for place, (one, other) in enumerate(zip(want, got, strict=True)):
        largest = float(one.double().abs().max())
        off = float((one.double() - other.double()).abs().max())
        if not off <= _SAME * largest:
            return f"failed: result {place} differs by {off:.2g}, its largest element is {largest:.2g}"
    return PASSED


def settle(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def on_device(recorded: Any) -> list[Any]:
    """Return the events of a profile that took the device's time."""
    return [event for event in recorded.events() or [] if str(event.device_type).endswith("CUDA")]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


class Gap(NamedTuple):
    """When nothing ran between two kinds of kernels.

    Attributes:
        before, after: names.
        total: length of all such gaps.
        number: of them.
    """

    before: str
    after: str
    total: float
    number: int


def gaps(spans: Iterable[tuple[float, float, str]]) -> list[Gap]:
    """Return the gaps between spans (begin, end, name) by the names on both sides, the longest in all first."""
    total: dict[tuple[str, str], float] = {}
    number = Counter[tuple[str, str]]()
    last: tuple[float, str] | None = None
    for begin, end, name in sorted(spans):
        if last is not None and begin > last[0]:
            sides = last[1], name
            total[sides] = total.get(sides, 0.0) + begin - last[0]
            number[sides] += 1
        if last is None or end > last[0]:
            last = end, name
    return [Gap(*sides, total[sides], number[sides]) for sides in sorted(total, key=total.__getitem__, reverse=True)]
