"""`python -m benchmarks.run diagnose --dir DIR`: are faults named that are put into real runs, and what they cost?

A case is visited with its fault and without it in turns; a visit is a run of a few steps in processes that stay up.
Each is in DIR/journal.jsonl at once: the same command goes on where it was interrupted, or where its minutes were over.
The fault's size is a share of the step that was measured without it.

1. The run without the fault says how long a step is.
   A visit whose steps differ by a tenth was disturbed by other work: it is made again, and the row counts such visits.
2. The run with it leaves a directory, which is diagnosed as `tpengine diagnose` does.
3. What the verdict's change brings by the simulator stands beside what the run without the fault takes less.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.journal import append, read
from benchmarks.harness.rows import stored
from benchmarks.planner.diagnosis.cases import Case, all_cases
from benchmarks.planner.diagnosis.faults import Fault
from benchmarks.planner.diagnosis.table import WITH, WITHOUT, is_disturbed, row_of, table, verdict
from tpengine.config import Config, validate
from tpengine.distributed.local_ranks import Ranks
from tpengine.planner.diagnose import Fault as Verdict
from tpengine.planner.diagnose import diagnose
from tpengine.planner.diagnose.changes import changed

_JOURNAL, _RUNS = "journal.jsonl", "runs"
# A case that is always disturbed is given up.
_MOST_DISTURBED = 6


@dataclass(frozen=True)
class Options:
    """Put faults into runs, diagnose them, and take them out again."""

    dir: Path = Path("diagnosis")
    """Journal, and the directories of the newest runs; the same directory goes on."""
    cases: str = ""
    """Only cases whose name has this pattern in it."""
    rounds: int = 2
    """Visits of each case with its fault, and as many without."""
    minutes: float = 60.0
    """When to stop; what was visited by then is told."""
    out: Path | None = None
    """Append one JSON line per case; results to keep go to benchmarks/results."""


def main(options: Options) -> int:
    """Visit, diagnose, tell; return 0.

    Raises:
        ValueError: no case has the pattern.
    """
    cases = [case for case in all_cases() if re.search(options.cases, case.name)]
    if not cases:
        names = ", ".join(case.name for case in all_cases())
        raise ValueError(f"--cases must be in a case's name: got {options.cases!r}: use one of {names}")
    options.dir.mkdir(parents=True, exist_ok=True)
    visits = _visited(options, cases)
    rows = [row for case in cases if (row := row_of(case, [v for v in visits if v["case"] == case.name]))]
    Console(width=140).print(table(rows))
    for line in verdict(rows):
        print(line)
    return stored(rows, options.out)


def _visited(options: Options, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Visit what the journal lacks; return all visits."""
    journal, end = options.dir / _JOURNAL, time.monotonic() + 60 * options.minutes
    visits = read(journal)
    for num_ranks in sorted({case.num_ranks for case in cases}):
        left = [case for case in cases if case.num_ranks == num_ranks and next_side(case, visits, options.rounds)]
        if not left or time.monotonic() > end:
            continue
        with Ranks(num_ranks, "benchmarks.planner.diagnosis.member:Member") as ranks:
            for case in left:
                while (side := next_side(case, visits, options.rounds)) and time.monotonic() <= end:
                    visit = _visit(ranks, options.dir / _RUNS, case, side, visits)
                    append(journal, visit)
                    visits.append(visit)
                    print(f"{case.name}, {side}: {min(visit['seconds']):.3g} s {visit.get('verdict', '')}", flush=True)
    if time.monotonic() > end:
        print("time is up: the same command goes on", flush=True)
    return visits


def next_side(case: Case, visits: Sequence[Mapping[str, Any]], rounds: int) -> str:
    """Return which side of a case comes next; empty when it is done. A step without comes first where it is needed."""
    of_case = [visit for visit in visits if visit["case"] == case.name]
    counted = [visit for visit in of_case if not is_disturbed(visit)]
    if len(of_case) - len(counted) >= _MOST_DISTURBED:
        return ""
    done = {side: sum(visit["side"] == side for visit in counted) for side in (WITH, WITHOUT)}
    if case.verdict is Verdict.NONE:
        return WITH if done[WITH] < rounds else ""
    if min(done.values()) >= rounds:
        return ""
    if case.healed is None and any(v["side"] == WITH and not v["change"] for v in counted):
        # Nothing is known that would bring anything.
        return WITH if done[WITH] < rounds else ""
    # Where the diagnosis names the run without, it must come first; else that run says the fault's size.
    first, second = (WITH, WITHOUT) if case.healed is None else (WITHOUT, WITH)
    return first if done[first] <= done[second] else second


def _visit(ranks: Ranks, runs: Path, case: Case, side: str, visits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Run one side of a case; return its journal's row."""
    place = runs / re.sub(r"\W+", "-", f"{case.name} {side}")
    of_case = [visit for visit in visits if visit["case"] == case.name]
    config, fault = _side(ranks, runs, case, side, of_case)
    seconds = _ran(ranks, place, config, fault, case.forward_seconds)
    row: dict[str, Any] = {"case": case.name, "side": side, "seconds": seconds}
    if side == WITHOUT:
        return row
    found = diagnose(place)
    first = found.findings[0] if found.findings else None
    return row | {
        "verdict": found.fault,
        "says": found.lines(),
        "brings": first.brings if first else 0.0,
        "worth": first.seconds if first else 0.0,
        "floor": found.baseline.floor,
        "change": first.change if first else "",
    }


def _side(
    ranks: Ranks, runs: Path, case: Case, side: str, of_case: Sequence[Mapping[str, Any]]
) -> tuple[Config, Fault]:
    if case.healed is None:
        if side == WITH:
            return case.config, case.fault(0.0)
        # The change of the newest verdict; where it is none that a run can take, the run stays as it is.
        change = next(v["change"] for v in reversed(of_case) if v["side"] == WITH and not is_disturbed(v))
        settings = settings_of(change)
        return validate(changed(case.config, **settings), case.num_ranks), case.fault(0.0)
    known = [min(v["seconds"]) for v in of_case if v["side"] == WITHOUT and not is_disturbed(v)]
    if not known:
        known = [min(_ran(ranks, runs / "bare", case.config, case.bare, case.forward_seconds))]
    step = min(known)
    return case.config, case.fault(step) if side == WITH else case.healed(step)


def _ran(ranks: Ranks, place: Path, config: Config, fault: Fault, forward_seconds: float) -> list[float]:
    """Return the seconds of a run's steps, on the rank that took longest."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    answers = ranks.call("run", config, str(place), fault, forward_seconds)
    return [max(of) for of in zip(*answers, strict=True)]


def settings_of(change: str) -> dict[str, Any]:
    """Return the settings of a verdict's change, by their names: of --parallel.zero 1 (...), zero 1."""
    words = change.split(" (")[0].split(", a batch")[0].split()
    if not all(flag.startswith("--") for flag in words[::2]):
        return {}
    flags = zip(words[::2], words[1::2], strict=True)
    settings = {flag.partition(".")[2].replace("-", "_"): value for flag, value in flags}
    return {name: int(value) if value.isdecimal() else value for name, value in settings.items()}
