"""Tables of results that several benchmarks use; a table of one benchmark is in its own file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.harness.timing import PASSED


def speed_table(
    title: str, labels: Mapping[str, Sequence[str]], rows: Sequence[Mapping[str, Any]], ours: str, theirs: str
) -> Table:
    """Return a table of how much faster ours is than theirs, one line per row; a red check shows its reason only.

    Args:
        labels: columns before the numbers, one text per row; the first names the case.
        rows: with the fields of `Comparison.fields(theirs)`.
        ours, theirs: the two variants.
    """
    table = Table(title=title, box=box.SIMPLE)
    for i, name in enumerate((*labels, ours, theirs, f"{theirs} / {ours}", "p20 to p80")):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row, *before in zip(rows, *labels.values(), strict=True):
        if row["check"] != PASSED:
            table.add_row(*before, row["check"])
            continue
        times = [f"{row[f'{name}_median_seconds'] * 1e3:.2f}" for name in (ours, theirs)]
        median, p20, p80 = (row[f"{ours}_speedup_over_{theirs}_{which}_ratio"] for which in ("median", "p20", "p80"))
        table.add_row(*before, *times, f"{median:.2f}", f"{p20:.2f} to {p80:.2f}")
    return table
