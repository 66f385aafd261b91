"""The rows about cases themselves, among those of results: that one started, and how it ended. No torch."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

ROWS = "rows.jsonl"
PREFLIGHT, RUN_CASE, HOW, STARTED = "preflight", "run_case", "how", "started"
# Of these a later start does not run the case again. One that hung is run once more: what it compiled is in the caches.
DONE = ("passed", "wrong", "crashed")
HUNG, _MOST_HANGS = "hung", 2
_DID_NOT_START = ("left out", "no time")
# A figure of fewer samples says that something runs, not how fast it is: those of smoke cases.
FEWEST_SAMPLES = 5


class Where(NamedTuple):
    """What rows of one run share, as every row says it: another GPU, or another revision, has other figures.

    Attributes:
        gpu: its name; None for a CPU.
        commit: the revision; None if nobody names it.
    """

    gpu: str | None
    commit: str | None

    @property
    def fields(self) -> dict[str, Any]:
        """Return them as fields of a row."""
        return self._asdict()


def by_place(rows: Iterable[Mapping[str, Any]]) -> dict[Where, list[Mapping[str, Any]]]:
    """Return the rows by GPU and revision, those of the last row last."""
    found, last = dict[Where, list[Mapping[str, Any]]](), dict[Where, int]()
    for place, row in enumerate(rows):
        where = Where(row.get("gpu"), row.get("commit"))
        found.setdefault(where, []).append(row)
        last[where] = place
    return {where: found[where] for where in sorted(found, key=last.__getitem__)}


def outcomes(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return how each case ended last; one that started and never ended was cut."""
    found: dict[str, str] = {}
    for row in rows:
        if RUN_CASE in row:
            how = str(row.get(HOW))
            before = found.get(str(row[RUN_CASE]))
            # What was run stays so, whatever a later start had no time or no module for.
            if before not in DONE and not (before == HUNG and how in _DID_NOT_START):
                found[str(row[RUN_CASE])] = "cut" if how == STARTED else how
    return found


def done(every: Iterable[Mapping[str, Any]], where: Where) -> set[str]:
    """Return the names of the cases that a later start on this GPU, at this revision, does not run again."""
    rows = by_place(every).get(where, [])
    hangs = Counter(str(row[RUN_CASE]) for row in rows if row.get(HOW) == HUNG)
    ended = {name for name, how in outcomes(rows).items() if how in DONE}
    return ended | {name for name, number in hangs.items() if number >= _MOST_HANGS}


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
