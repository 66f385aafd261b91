"""The rows about cases themselves, among those of results: that one started, and how it ended. No torch."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any

ROWS, LOG = "rows.jsonl", "log.txt"
PREFLIGHT, RUN_CASE, HOW, STARTED = "preflight", "run_case", "how", "started"
# Of these a second start does not run the case again.
DONE = ("passed", "wrong", "crashed", "hung")
# A figure of fewer samples says that something runs, not how fast it is: those of smoke cases.
FEWEST_SAMPLES = 5


def outcomes(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return how each case ended last; one that started and never ended was cut."""
    found: dict[str, str] = {}
    for row in rows:
        if RUN_CASE in row:
            how = str(row.get(HOW))
            # What was done stays done, whatever a later start had no time or no module for.
            if found.get(str(row[RUN_CASE])) not in DONE:
                found[str(row[RUN_CASE])] = "cut" if how == STARTED else how
    return found


def results(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of results: for each name and number of ranks the last one; a smoke row replaces none."""
    return list({(str(row["case"]), num_ranks(row), has_samples(row)): row for row in rows if "case" in row}.values())


def num_ranks(row: Mapping[str, Any]) -> int | None:
    """Return the number of ranks that a row's name does not tell, or None."""
    found = row.get("virtual_ranks", row.get("ranks"))
    return found if isinstance(found, int) else None


def has_samples(row: Mapping[str, Any]) -> bool:
    """Return whether a row's figures are of enough samples, or it does not say of how many."""
    return int(row.get("num_samples", FEWEST_SAMPLES)) >= FEWEST_SAMPLES


def now() -> str:
    """Return the time as rows have it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
