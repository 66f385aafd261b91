"""The tables of a run, also of one that was cut: what is fast, what is slow, what is wrong, what failed. No torch.

What matters most comes last: whoever runs the command may see only the end of what it prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.tables.bars import verdicts
from benchmarks.gpu.tables.rows import (
    HOW,
    PREFLIGHT,
    RUN_CASE,
    Where,
    by_place,
    has_samples,
    num_ranks,
    outcomes,
    results,
)
from benchmarks.harness.journal import read

_COLUMNS = 150
_STYLES = {"met": "green", "short": "red", "passed": "green", "wrong": "red", "crashed": "red", "hung": "red"}
# Fields of a row that are among its figures: what is named, what is counted, what is measured.
_TEXTS, _COUNTS = ("kernel", "before", "after", "what", "left_out"), "num_"
_UNITS = ("_us", "_percent", "_per_second", "_ratio", "_bytes")
_SPREADS = ("_p20_", "_p80_")

Row = Mapping[str, Any]


def print_report(path: Path, copy: Path | None) -> None:
    """Print the tables of a file of rows, and write them to a second place if one is given."""
    rows = read(path)
    Console(width=_COLUMNS).print(*tables(rows), sep="\n")
    if copy is not None:
        with copy.open("w") as file:
            Console(width=_COLUMNS, file=file).print(*tables(rows), sep="\n")


def tables(rows: Sequence[Row]) -> list[Table | str]:
    """Return everything that there is to say, of each GPU and revision apart: no figure is held against another's."""
    return [table for where, own in by_place(rows).items() for table in _of_place(where, own)]


def _of_place(where: Where, rows: Sequence[Row]) -> list[Table | str]:
    preflight: Mapping[str, Any] = next((row[PREFLIGHT] for row in reversed(rows) if PREFLIGHT in row), {})
    found = results(rows)
    title = f"{where.gpu or 'no GPU'}, revision {where.commit or 'not known'}"
    if preflight:
        title += f", torch {preflight.get('torch')}, triton {preflight.get('triton')}"
    measured = [row for row in found if has_samples(row)]
    every: list[Table | str] = [title, _figures(measured), _speeds(measured, preflight)]
    every += _wrong(found), _ended(rows), _bars(found)
    return [table for table in every if isinstance(table, str) or table.row_count]


def _bars(found: Sequence[Row]) -> Table:
    table = _table("Bars", "bar", "", "found")
    for verdict in verdicts(found):
        table.add_row(verdict.bar, verdict.state, verdict.found, style=_STYLES.get(verdict.state))
    return table


def _ended(rows: Sequence[Row]) -> Table:
    """Return how cases ended: how many passed, and each that did not, the worst last."""
    table = _table("Cases", "how", "case", "s", "last line")
    last = {row[RUN_CASE]: row for row in rows if row.get(HOW) not in (None, "started")}
    ended = outcomes(rows)
    passed = [name for name, how in ended.items() if how == "passed"]
    table.add_row("passed", f"{len(passed)} of {len(ended)}", "", "", style=_STYLES["passed"])
    for how in ("no time", "left out", "cut", "wrong", "hung", "crashed"):
        for name in (name for name, its in ended.items() if its == how):
            row = last.get(name, {})
            lines = row.get("last_lines") or [f"needs {', '.join(row['missing'])}" if "missing" in row else ""]
            seconds = f"{row['took_seconds']:.0f}" if "took_seconds" in row else ""
            table.add_row(how, name, seconds, str(lines[-1]), style=_STYLES.get(how))
    return table


def _wrong(found: Sequence[Row]) -> Table:
    table = _table("Wrong results", "what", "why")
    for row in found:
        if row.get("check", "passed") != "passed":
            table.add_row(_named(row), str(row["check"]))
    return table


def _speeds(found: Sequence[Row], preflight: Row) -> Table:
    """Return our speed over the fastest rival's, the slowest first; the title says which rival was not there."""
    absent = "" if preflight.get("liger_kernel") else "; liger: not installed"
    table = _table(
        f"Speed over the fastest rival, slowest first{absent}", "ours / rival", "case", "rival", "of the ceiling"
    )
    name = "speedup_over_best_rival_median_ratio"
    for row in sorted((row for row in found if name in row), key=lambda row: float(row[name])):
        percent = row.get(f"{row['ours']}_of_ceiling_percent")
        ceiling = "" if percent is None else f"{percent:.0f} % of a {row['ceiling']}"
        style = "red" if row[name] < 1 else "green"
        case = _named(row).removeprefix("kernels/")
        table.add_row(f"{row[name]:.2f}", case, row["best_rival"], ceiling, style=style)
    return table


def _figures(found: Sequence[Row]) -> Table:
    """Return the figures of rows that no table above shows."""
    table = _table("Figures", "case", "figures")
    for row in found:
        name = str(row["case"])
        # A tile's own time is among the rows; the fastest one is among the speeds.
        if name.startswith(("kernels/", "overlap/", "compile/", "tiles/")) or row.get("check", "passed") != "passed":
            continue
        shown = [f"{n} {v}" for n, v in row.items() if n in _TEXTS or n.startswith(_COUNTS)]
        figures = {n: v for n, v in row.items() if n.endswith(_UNITS) and not any(part in n for part in _SPREADS)}
        shown += [f"{n} {v:.4g}" for n, v in figures.items() if v is not None]
        table.add_row(_named(row), ", ".join(shown))
    return table


def _named(row: Row) -> str:
    """Return the name of a row, with its number of ranks if it has one."""
    ranks = num_ranks(row)
    return str(row["case"]) if ranks is None else f"{row['case']}, {ranks} ranks"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
