"""What visits of cases have found: a row per case, the table, and the verdict over all."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.harness.rows import make_row
from benchmarks.harness.timing import PASSED
from benchmarks.planner.diagnosis.cases import Case
from tpengine.distributed.local_ranks import THREADS_PER_RANK
from tpengine.planner.diagnose import Fault as Verdict

WITH, WITHOUT = "with", "without"
NAMED_FROM = 0.2
_NEAR = 0.25


def row_of(case: Case, visits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a case's row; empty if it has not been visited with its fault, or not without it where it can be."""
    counted = [visit for visit in visits if not is_disturbed(visit)]
    ill = [visit for visit in counted if visit["side"] == WITH]
    well = [visit for visit in counted if visit["side"] == WITHOUT]
    can_be_well = case.healed is not None or any(visit["change"] for visit in ill)
    if not ill or (case.verdict is not Verdict.NONE and can_be_well and not well):
        return {}
    step = _fastest(ill)
    fields: dict[str, Any] = {
        "verdict": case.verdict,
        "ranks": case.num_ranks,
        "is_paced": case.forward_seconds > 0.0,
        "nominal_share_ratio": case.share,
        "verdicts": [visit["verdict"] for visit in ill],
        "is_right": all(visit["verdict"] == case.verdict for visit in ill),
        "step_seconds": step,
        "noise_ratio": statistics.median(visit["floor"] for visit in ill),
        "says": ill[-1]["says"][0],
        "num_visits": len(ill),
        "num_disturbed": len(visits) - len(counted),
    }
    if well:
        brought = step - _fastest(well)
        right = [visit for visit in ill if visit["verdict"] == case.verdict]
        fields |= {"brought_seconds": brought, "share_ratio": brought / step}
        if right:
            fields["brings_seconds"] = statistics.median(visit["brings"] for visit in right)
    return make_row(case.name, threads_per_rank=THREADS_PER_RANK, fields={"check": PASSED, **fields})


def is_disturbed(visit: Mapping[str, Any]) -> bool:
    """Return whether something else kept a visit's ranks from running: its middle step is a tenth longer than one."""
    return statistics.median(visit["seconds"]) > 1.1 * min(visit["seconds"])


def _fastest(visits: Sequence[Mapping[str, Any]]) -> float:
    """Return the median over visits of the fastest step: what else a host does only makes steps slower."""
    return statistics.median(min(visit["seconds"]) for visit in visits)


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a line per case."""
    found = Table(title="faults in real runs", box=box.SIMPLE)
    for name in ("case", "verdicts", "step", "share", "brings", "brought", "brings / brought"):
        found.add_column(name, justify="left" if name in ("case", "verdicts") else "right")
    for row in rows:
        seconds = [f"{row[name]:.3f} s" if name in row else "" for name in ("brings_seconds", "brought_seconds")]
        share = f"{row['share_ratio']:.0%}" if "share_ratio" in row else ""
        counted = {name: row["verdicts"].count(name) for name in dict.fromkeys(row["verdicts"])}
        said = ", ".join(f"{name} {number}" for name, number in counted.items())
        ratio = f"{_ratio(row):.2f}" if "brings_seconds" in row else ""
        found.add_row(row["case"], said, f"{row['step_seconds']:.3f} s", share, *seconds, ratio)
    return found


def _ratio(row: Mapping[str, Any]) -> float:
    return float(row["brings_seconds"] / row["brought_seconds"]) if row["brought_seconds"] else float("inf")


def verdict(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield how many verdicts are right, and how near the brought times are, by what the issue asks for."""
    healthy = [row for row in rows if row["verdict"] == Verdict.NONE]
    if healthy:
        yield f"healthy runs: {sum(row['is_right'] for row in healthy)} of {len(healthy)} have no verdict in any visit"
    large = [row for row in rows if row["verdict"] != Verdict.NONE and row["nominal_share_ratio"] >= NAMED_FROM]
    if large:
        yield (
            f"faults of {NAMED_FROM:.0%} of the step or more: the first verdict is right in every visit of "
            f"{sum(row['is_right'] for row in large)} of {len(large)}"
        )
    told = [row for row in large if "brings_seconds" in row]
    if told:
        near = sum(abs(_ratio(row) - 1.0) <= _NEAR for row in told)
        yield f"what the change brings is within {_NEAR:.0%} of what it brought in {near} of {len(told)}"
    small = [row for row in rows if row["verdict"] != Verdict.NONE and row["nominal_share_ratio"] < NAMED_FROM]
    if small:
        allowed = sum(set(row["verdicts"]) <= {row["verdict"], Verdict.NONE} for row in small)
        yield f"smaller faults: named rightly or not at all in {allowed} of {len(small)}"
