"""Numbers and table of `benchmarks.run overlap`; command.py defines ECT, E and the ceiling.

If several variants are possible for a bar, the one with the smallest median is the bar, and a field names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.harness.timing import PASSED, Comparison, spread_fields

MATMUL, SERIAL = "matmul", "serial"
# Bars for which an ECT is reported.
_WITH_ECT = ("own", SERIAL, "fused")
_TORCH = "torch.mm"


def overlap_fields(comparison: Comparison, bars: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return check, times, ratios within rounds, ECT, E and ceiling as fields of a row; only the check if it is red.

    Args:
        comparison: of all variants, including torch.mm.
        bars: by bar, its variants, of which the fastest is taken; "matmul", "own", "serial" and "fused" must be there.
    """
    fields: dict[str, Any] = {"check": comparison.check}
    if not comparison.passed:
        return fields
    seconds = {name: comparison.seconds(name) for name in comparison.samples}
    medians = {name: spread.median for name, spread in seconds.items() if spread is not None}
    fastest = {bar: min(variants, key=medians.__getitem__) for bar, variants in bars.items()}
    fields |= {f"fastest_{bar}": fastest[bar] for bar, variants in bars.items() if len(variants) > 1}
    fields["num_samples"] = len(comparison.samples[fastest["fused"]])
    for bar, name in fastest.items():
        fields |= spread_fields(bar, "seconds", seconds[name])
    for bar, name in fastest.items():
        if bar != MATMUL:
            fields |= spread_fields(f"{bar}_over_matmul", "ratio", comparison.ratio(name, fastest[MATMUL]))
    fields |= spread_fields("fused_over_torch_mm", "ratio", comparison.ratio(fastest["fused"], _TORCH))
    ect = {bar: medians[fastest[bar]] - medians[fastest[MATMUL]] for bar in _WITH_ECT if bar in fastest}
    fields |= {f"ect_{bar}_seconds": value for bar, value in ect.items()}
    if ect[SERIAL] > 0:
        for bar, what in (("fused", "efficiency"), ("own", "ceiling")):
            fields[f"overlap_{what}_ratio"] = 1 - ect[bar] / ect[SERIAL]
    return fields


def overlap_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of rows, one line each; a red check shows that and no number."""
    table = Table(
        box=box.SIMPLE,
        title=title,
        caption=(
            "matmul: the fastest plain one; own: as fused does it, all operands present; serial: beside a collective\n"
            "/ matmul, / torch.mm: fused over the fastest plain matmul, and over torch.mm\n"
            "E: hidden part of serial's communication (1 all, 0 none, below 0 a loss); ceiling: E of own"
        ),
    )
    bars = (MATMUL, "own", SERIAL, "fused")
    shares = {"E": "efficiency", "ceiling": "ceiling"}
    for name in ("case", *bars, "/ matmul", "/ torch.mm", *shares):
        table.add_column(name, justify="left" if name == "case" else "right", no_wrap=True)
    for row in rows:
        case = "/".join(row["case"].split("/")[1:3])
        if row["check"] != PASSED:
            table.add_row(case, "check failed")
            continue
        times = [row.get(f"{bar}_median_seconds") for bar in bars]
        cells = ["-" if value is None else f"{value * 1e3:.2f}" for value in times]
        cells += [f"{row[f'fused_over_{bar}_median_ratio']:.3f}" for bar in ("matmul", "torch_mm")]
        found = [row.get(f"overlap_{what}_ratio") for what in shares.values()]
        table.add_row(case, *cells, *("-" if value is None else f"{value:.2f}" for value in found))
    return table
