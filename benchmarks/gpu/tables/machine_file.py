"""A machine's file for `tpengine plan` and `tpengine advise`, from the planner's rows of a run on one GPU. No torch.

What was measured takes the place of the data sheet's shares: a layer's three products by size, attention and its
gradient, copies within memory, the host's time of an operator. If the engine's operators were measured one by one (the
case planner/machine), their rates are the file's. One GPU has no link to another, so links stay those of the sheet.
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
from tpengine.planner.machine import MACHINES, Curve, Machine, Measured, machine_of_values, machine_text

MACHINE_FILE, MACHINE_ROW = "machine.toml", "planner/machine"
_DTYPE = "bfloat16"
# What one GPU alone does not tell.
_OF_THE_SHEET = ("within", "between", "ranks_per_node", "num_nodes", "memory_bytes", "chip_spread")
# The operator whose start is timed: ours, through its registered form.
_OPERATOR = "planner/launch/triton_norm"

Row = Mapping[str, Any]


def write_machine(rows: Path, folder: Path) -> str:
    """Write machine.toml of the last GPU of a run into a folder; return a line that says so, or why there is none."""
    every = read(rows)
    preflight: Row = next((row[PREFLIGHT] for row in reversed(every) if PREFLIGHT in row), {})
    every = [row for row in every if row.get("gpu", preflight.get("gpu")) == preflight.get("gpu")]
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
    path = folder / MACHINE_FILE
    write_beside(path, text.encode())
    return f"wrote {path}: for tpengine advise --machine {path}:8x1"


def machine_like(gpu: str, memory_bytes: int) -> Machine | None:
    """Return the machine whose data sheet is that of a GPU by its name, of several the one with like memory."""
    words = re.sub(r"[^a-z0-9]", " ", gpu.lower()).split()
    named = [machine for machine in MACHINES.values() if machine.name.split("-")[0] in words]
    return min(named, key=lambda machine: abs(machine.memory_bytes - memory_bytes), default=None)


def machine_of_rows(rows: Iterable[Row], base: Machine) -> Machine | None:
    """Return the machine with the measured rates; None if planner/machine, or products and copies, are missing.

    Args:
        rows: results, of each name the last.
        base: the data sheet's, of which the rest stays.
    """
    counted = [row for row in rows if row.get("check") == "passed" and has_samples(row)]
    measured = machine_in(counted)
    if measured is not None:
        return replace(
            measured,
            name=base.name,
            source=f"{measured.source}; links, memory and other dtypes of the data sheet",
            flops_per_s={**base.flops_per_s, **measured.flops_per_s},
            **{name: getattr(base, name) for name in _OF_THE_SHEET},
        )
    products = [row for row in counted if str(row["case"]).startswith("planner/matmul/")]
    matmul = _medians((2.0 * row["m"] * row["n"] * row["k"], row["ours_flops_per_second"]) for row in products)
    # A copy reads and writes.
    copies = _medians(
        (2.0 * row["num_bytes"], 2.0 * row["within_bytes_per_second"])
        for row in counted
        if str(row["case"]).startswith("planner/copy/")
    )
    if not matmul or not copies:
        return None
    starts = [1e-6 * row["host_us"] for row in counted if row["case"] == _OPERATOR]
    peak = base.peak(_DTYPE)
    memory = Curve(tuple((size, rate / base.memory_bytes_per_s) for size, rate in copies))
    found = _attention(counted, base)
    attention, gradient = found or (base.attention, base.attention_gradient)
    known = ", ".join(("products", *["attention"] * (found is not None), "copies"))
    return replace(
        base,
        source=f"{base.source}; {known} and launches measured on one GPU",
        matmul=Curve(tuple((flops, rate / peak) for flops, rate in matmul)),
        attention=attention,
        attention_gradient=gradient,
        memory=memory,
        host_s_per_operator=starts[0] if starts else base.host_s_per_operator,
        # What products attain counts, not tiles.
        num_processors=0,
        measured={_DTYPE: Measured(_products(products, base.memory_bytes_per_s, memory))},
    )


def machine_in(rows: Iterable[Row]) -> Machine | None:
    """Return the machine of which the engine's operators were measured one by one; None if none was."""
    values = [row["machine"] for row in rows if row["case"] == MACHINE_ROW and row.get("check") == "passed"]
    return machine_of_values(values[-1], MACHINE_ROW) if values else None


def _products(rows: Iterable[Row], bytes_per_s: float, memory: Curve) -> dict[str, dict[int, Curve]]:
    """Return what a layer's products attain, by tokens and elements of the weight.

    Outputs and their inputs' gradients are torch's products. Weights' gradients are ours, [columns, tokens] @ [tokens,
    inner], which are added to a sum in float32: read and written besides.
    """
    forward: dict[int, list[tuple[float, float]]] = {}
    weights: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        m, n, k = row["m"], row["n"], row["k"]
        forward.setdefault(m, []).append((float(n * k), row["torch_flops_per_second"]))
        added_bytes = 2.0 * 4 * m * n
        seconds = 2 * m * n * k / row["ours_flops_per_second"] + added_bytes / (bytes_per_s * memory.at(added_bytes))
        weights.setdefault(k, []).append((float(m * n), 2 * m * n * k / seconds))
    by_tokens, added = (
        {tokens: Curve(tuple(_medians(points))) for tokens, points in of.items()} for of in (forward, weights)
    )
    return {"forward": by_tokens, "input_gradient": by_tokens, "weight_gradient": added}


def _attention(rows: Sequence[Row], base: Machine) -> tuple[Curve, float] | None:
    """Return shares of the peak by operations, and what of it the gradient attains; None if either is not there.

    Of fewer operations than were measured the data sheet's shares hold: they do not fill the processors.
    """
    peak = base.peak(_DTYPE)
    forward, backward = (
        _medians(
            (float(row["work_flops"]), row["tpkernels_flops_per_second"] / peak)
            for row in rows
            if str(row["case"]).startswith("kernels/attention/") and row["direction"] == direction
        )
        for direction in ("forward", "backward")
    )
    if not forward or not backward:
        return None
    fewest = forward[0][0]
    shares = Curve((*(point for point in base.attention.points if point[0] < fewest), *forward))
    return shares, statistics.median(share / shares.at(flops) for flops, share in backward)


def _medians(points: Iterable[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return (size, median rate) by rising size."""
    by_size: dict[float, list[float]] = {}
    for size, rate in points:
        by_size.setdefault(size, []).append(rate)
    return [(size, statistics.median(rates)) for size, rates in sorted(by_size.items())]
