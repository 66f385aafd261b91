"""`python -m benchmarks.run launches`: what a block and the end of a step launch, and the bytes moved, without a GPU.

A block's launches are the difference between a step with two layers and one with one: so what a block hands to the
next, such as a sum for its norm, is counted where it is launched. The end of a step is that of the whole model: zeros
for the gradients, their norm, clipping and the update. A row changes with the engine, and nothing in this file; what it
does not have from a GPU's own choice is said in step.py, and by the row's `attention` and `weight_gradients`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from tpkernels.launch import INTERPRETED, Target

from benchmarks.harness.journal import append
from benchmarks.harness.rows import make_row
from benchmarks.launches.step import BACKWARD, COUNTED, END, FORWARD, Launch, step_of
from benchmarks.launches.traffic import Call, moved_bytes
from tpengine.config.presets import preset_config

_TARGET = Target("cuda", 90)


@dataclass(frozen=True)
class Options:
    """Launches of a block per micro-batch and of a step's end, with the bytes that they move."""

    preset: str = "llama_1b"
    """The model, on one GPU."""
    traffic: bool = True
    """Interpret Triton's kernels to count the bytes that they load and store: minutes."""
    jobs: int = 2
    """Processes that interpret."""
    out: Path | None = None
    """Append one JSON line per part and kernel to this file."""


class KernelLaunches(NamedTuple):
    """The launches of one kernel in one part.

    Attributes:
        part: "forward", "backward" or "end".
        kernel: its name; torch's begin with "aten.".
        num_launches: of a block and micro-batch, or of a step's end.
        least_bytes: of the operands of all these launches, each once a launch.
        calls: Triton's launches.
    """

    part: str
    kernel: str
    num_launches: int
    least_bytes: int
    calls: tuple[Call, ...]


def launches_of(preset: str) -> list[KernelLaunches]:
    """Return what a block of the preset's model launches, forward and backward, and what its step's end launches."""
    one, two = (_by_kernel(step_of(preset, num_layers, _TARGET)) for num_layers in (1, 2))
    whole = _by_kernel(step_of(preset, preset_config(preset).model.num_layers, _TARGET))
    empty = KernelLaunches("", "", 0, 0, ())
    found = []
    for place, more in two.items():
        less = one.get(place, empty)
        if place[0] in (FORWARD, BACKWARD) and more.num_launches != less.num_launches:
            # The first calls of a part are the ends' and the first block's, or the last block's: as many are left out.
            calls = more.calls[len(less.calls) :]
            number, least = more.num_launches - less.num_launches, more.least_bytes - less.least_bytes
            found.append(KernelLaunches(*place, number, least, calls))
    return found + [each for (part, _), each in whole.items() if part == END]


def _by_kernel(launches: Sequence[Launch]) -> dict[tuple[str, str], KernelLaunches]:
    found: dict[tuple[str, str], KernelLaunches] = {}
    for one in launches:
        place = one.part, one.kernel
        before = found.get(place, KernelLaunches(*place, 0, 0, ()))
        calls = before.calls if one.call is None else (*before.calls, Call.of(one.call))
        found[place] = KernelLaunches(
            *place, before.num_launches + one.number, before.least_bytes + one.operands_bytes, calls
        )
    return found


def totals(launches: Sequence[KernelLaunches]) -> Counter[str]:
    """Return the number of launches of each part."""
    counted: Counter[str] = Counter()
    for each in launches:
        counted[each.part] += each.num_launches
    return counted


def main(options: Options) -> int:
    """Count, print tables; return 0."""
    if INTERPRETED:
        raise ValueError("launches must be those of a GPU: TRITON_INTERPRET is set, which chooses others: unset it")
    launches = launches_of(options.preset)
    moved = _moved(launches, options.jobs) if options.traffic else {}
    table = Table(title=f"{options.preset}: launches of a block and micro-batch, and of a step's end", box=box.SIMPLE)
    for column in ("part", "kernel", "launches", "MB, operands once", "MB, loaded and stored"):
        table.add_column(column, justify="left" if column in ("part", "kernel") else "right")
    for each in launches:
        fields: dict[str, Any] = {"part": each.part, "num_launches": each.num_launches, "least_bytes": each.least_bytes}
        bytes_moved = moved.get((each.part, each.kernel))
        if bytes_moved is not None:
            fields |= {"moved_bytes": bytes_moved, "moved_over_least_ratio": bytes_moved / each.least_bytes}
        _write(options, f"launches/{options.preset}/{each.part}/{each.kernel}", fields)
        shown = "" if bytes_moved is None else f"{bytes_moved / 1e6:.1f}"
        table.add_row(each.part, each.kernel, str(each.num_launches), f"{each.least_bytes / 1e6:.1f}", shown)
    for part, number in totals(launches).items():
        of_part = [each for each in launches if each.part == part]
        kernels = {each.kernel: each.num_launches for each in of_part}
        least = sum(each.least_bytes for each in of_part)
        fields = {"num_launches": number, "least_bytes": least, "kernels": kernels}
        _write(options, f"launches/{options.preset}/{part}", fields)
        table.add_row(part, "all", str(number), f"{least / 1e6:.1f}", "", style="bold")
    Console().print(table)
    return 0


def _moved(launches: Sequence[KernelLaunches], jobs: int) -> Mapping[tuple[str, str], int]:
    """Return the bytes that the Triton kernels of each part load and store; equal launches are interpreted once."""
    calls = {repr(call): call for each in launches for call in each.calls}
    found = dict(zip(calls, moved_bytes(list(calls.values()), jobs), strict=True))
    return {(each.part, each.kernel): sum(found[repr(call)] for call in each.calls) for each in launches if each.calls}


def _write(options: Options, case: str, fields: Mapping[str, Any]) -> None:
    if options.out is not None:
        append(options.out, make_row(case, threads_per_rank=1, fields={**fields, **COUNTED}))
