"""The table of one operator's rows: one line per contestant, ours first; below it why some are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.harness.timing import PASSED

_COLUMNS = ("", "time", "p20 to p80", "speed", "of ceiling", "ours over it", "peak MB")


def kernel_table(op: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of rows of `benchmarks.run kernels`; a red check shows its reason and no number.

    The last column is our speed-up: the median of ratios within rounds, and their 20th to 80th percentile; above 1 ours
    is faster. Below are the geometric means of these medians. The fastest rival is bold. There is a column for memory
    if it is known.
    """
    ceilings = dict.fromkeys(f"a large {row['ceiling']} here: {_speed(row, 'ceiling')}" for row in rows)
    table = Table(title=f"{op}; {', '.join(ceilings)}", box=box.SIMPLE)
    knows_memory = any(name.endswith("_peak_bytes") for row in rows for name in row)
    for i, name in enumerate(_COLUMNS if knows_memory else _COLUMNS[:-1]):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(row["case"].removeprefix("kernels/"), style="cyan")
        if row["check"] != PASSED:
            table.add_row("  wrong, see below", style="red")
        for name in sorted(row["contestants"], key=lambda name: name != row["ours"]):
            table.add_row(*_cells(row, name), style="bold" if name == row.get("best_rival") else None)
        table.add_section()
    table.caption = _means(rows)
    return table


def _means(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return our speed-up over each rival that took part in several rows; None if there is no such rival."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        for name in row["contestants"]:
            if name != row["ours"]:
                ratios.setdefault(name, []).append(row[f"{row['ours']}_speedup_over_{name}_median_ratio"])
    found = [f"{name} {geometric_mean(of):.3f} ({len(of)} rows)" for name, of in ratios.items() if len(of) > 1]
    return f"ours over it, geometric mean: {', '.join(found)}" if found else None


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why checks were red, and what was found about rivals, one line each."""
    lines = []
    for row in rows:
        case = row["case"].removeprefix("kernels/")
        if row["check"] != PASSED:
            lines.append(f"{case}: {row['check']}")
        of_shape = case.rpartition("/")[0]
        lines += [f"{of_shape}: {name} is left out: {reason}" for name, reason in row["left_out"].items()]
        lines += [f"{of_shape}: {name} is less exact: {reason}" for name, reason in row["less_exact"].items()]
    return list(dict.fromkeys(lines))


def _cells(row: Mapping[str, Any], name: str) -> list[str]:
    ours = row["ours"]
    median, p20, p80 = (row[f"{name}_{which}_seconds"] for which in ("median", "p20", "p80"))
    scale, unit = (1e6, "us") if median < 1e-3 else (1e3, "ms")
    cells = [f"  {name}", f"{median * scale:.2f} {unit}", f"{p20 * scale:.2f} to {p80 * scale:.2f}"]
    cells += [_speed(row, name), f"{row[f'{name}_of_ceiling_percent']:.0f} %"]
    if name == ours:
        cells.append("")
    else:
        ratio, low, high = (row[f"{ours}_speedup_over_{name}_{which}_ratio"] for which in ("median", "p20", "p80"))
        cells.append(f"{ratio:.2f} ({low:.2f} to {high:.2f})")
    peak = row.get(f"{name}_peak_bytes")
    return cells if peak is None else [*cells, f"{peak / 1e6:.1f}"]


def _speed(row: Mapping[str, Any], name: str) -> str:
    if row["ceiling"] == "copy":
        return f"{row[f'{name}_bytes_per_second'] / 1e9:.4g} GB/s"
    return f"{row[f'{name}_flops_per_second'] / 1e12:.3g} TFLOP/s"
