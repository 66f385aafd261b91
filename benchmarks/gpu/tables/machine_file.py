"""A machine's file for `tpengine plan` and `tpengine advise`, from the planner's rows of a run on one GPU. No torch.

What was measured takes the place of the data sheet's shares: products by size, copies within memory, the host's time of
an operator. One GPU has no link to another, so links stay those of the data sheet. `python -m benchmarks.run machine
--device cuda` measures the engine's operators one by one, which takes longer.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.tables.rows import PREFLIGHT, has_samples, results
from benchmarks.harness.journal import read
from tpengine.files import write_beside
from tpengine.simulate.machine import MACHINES, Curve, Machine, machine_text

MACHINE_FILE = "machine.toml"
# The operator whose start is timed: ours, through its registered form.
_OPERATOR = "planner/launch/triton_norm"

Row = Mapping[str, Any]


def write_machine(rows: Path) -> str:
    """Write machine.toml beside a run's rows; return a line that says so, or why there is none."""
    every = read(rows)
    preflight: Row = next((row[PREFLIGHT] for row in reversed(every) if PREFLIGHT in row), {})
    base = machine_like(preflight.get("gpu") or "", int(preflight.get("gpu_memory_bytes") or 0))
    if base is None:
        return f"no {MACHINE_FILE}: there is no data sheet of {preflight.get('gpu') or 'no GPU'}"
    measured = machine_of_rows(results(every), base)
    if measured is None:
        return f"no {MACHINE_FILE}: rows of planner/matmul or planner/copy are missing"
    try:
        text = machine_text(measured)
    except ImportError:
        return f"no {MACHINE_FILE}: tomli-w is not installed here: use --report {rows.parent} where it is"
    path = rows.parent / MACHINE_FILE
    write_beside(path, text.encode())
    return f"wrote {path}: for tpengine advise --machine {path}:8x1"


def machine_like(gpu: str, memory_bytes: int) -> Machine | None:
    """Return the machine whose data sheet is that of a GPU by its name, of several the one with like memory."""
    words = re.sub(r"[^a-z0-9]", " ", gpu.lower()).split()
    named = [machine for machine in MACHINES.values() if machine.name.split("-")[0] in words]
    return min(named, key=lambda machine: abs(machine.memory_bytes - memory_bytes), default=None)


def machine_of_rows(rows: Iterable[Row], base: Machine) -> Machine | None:
    """Return the machine with the measured rates; None without any product or copy.

    Args:
        rows: results, of each name the last.
        base: the data sheet's, of which the rest stays.
    """
    counted = [row for row in rows if row.get("check") == "passed" and has_samples(row)]
    matmul = _medians(
        (2.0 * row["m"] * row["n"] * row["k"], row["ours_flops_per_second"])
        for row in counted
        if str(row["case"]).startswith("planner/matmul/")
    )
    # A copy reads and writes.
    copies = _medians(
        (2.0 * row["num_bytes"], 2.0 * row["within_bytes_per_second"])
        for row in counted
        if str(row["case"]).startswith("planner/copy/")
    )
    if not matmul or not copies:
        return None
    starts = [1e-6 * row["host_us"] for row in counted if row["case"] == _OPERATOR]
    peak = base.peak("bfloat16")
    return replace(
        base,
        source=f"{base.source}; products, copies and launches measured on one GPU",
        matmul=Curve(tuple((flops, rate / peak) for flops, rate in matmul)),
        memory=Curve(tuple((size, rate / base.memory_bytes_per_s) for size, rate in copies)),
        host_s_per_operator=starts[0] if starts else base.host_s_per_operator,
        # The curve of products counts, not tiles.
        num_processors=0,
    )


def _medians(points: Iterable[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return (size, median rate) by rising size."""
    by_size: dict[float, list[float]] = {}
    for size, rate in points:
        by_size.setdefault(size, []).append(rate)
    return [(size, statistics.median(rates)) for size, rates in sorted(by_size.items())]
