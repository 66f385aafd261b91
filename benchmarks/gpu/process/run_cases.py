"""Run cases one after the other until the time is over, and write down how each ended. No torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.declared import PHASES, Case, chosen
from benchmarks.gpu.folder import Folder
from benchmarks.gpu.process import runner
from benchmarks.gpu.tables.rows import HOW, RUN_CASE, STARTED, Where, done, now
from benchmarks.harness.journal import append, read


def say(text: str) -> None:
    """Print a line of progress at once."""
    print(text, flush=True)


def run_cases(cases: Sequence[Case], folder: Folder, where: Where, deadline: float) -> None:
    """Run the cases that are not done and fit, one after the other; choose again after each.

    Args:
        cases: all that there are.
        folder: of the results; what is not a row is packed after each case.
        where: the GPU that is here, and the revision: what was done on another is run again.
        deadline: of time.monotonic, when the last case is cut.

    Raises:
        KeyboardInterrupt: Ctrl-C; the running case has been ended and is written down as cut.
    """
    rows = folder.rows
    ended = done(read(rows), where)
    waiting = [case for case in cases if case.name not in ended]
    if ended:
        say(f"{len(ended)} of {len(cases)} cases are done already")
    for case in waiting:
        if case.missing:
            append(rows, _row(case, where, "left out", missing=list(case.missing)))
    waiting = [case for case in waiting if not case.missing]
    while plan := chosen(waiting, deadline - time.monotonic()):
        case = plan[0]
        waiting.remove(case)
        left = deadline - time.monotonic()
        say(f"[{left / 60:5.1f} min left, {len(plan):2} cases to go] {case.name} ({case.seconds:.0f} s expected)")
        append(rows, _row(case, where, STARTED))
        before = len(read(rows))
        try:
            outcome = runner.run(case, rows, folder.log, left)
        except BaseException:
            append(rows, _row(case, where, "cut"))
            raise
        found = len(read(rows)) - before
        more = {"took_seconds": outcome.seconds, "num_rows": found, "last_lines": list(outcome.last_lines)}
        append(rows, _row(case, where, outcome.how, **more))
        folder.pack()
        last = "" if outcome.how == "passed" or not outcome.last_lines else f": {outcome.last_lines[-1]}"
        say(f"    {outcome.how} after {outcome.seconds:.0f} s, {found} rows{last}")
    for case in waiting:
        append(rows, _row(case, where, "no time"))


def _row(case: Case, where: Where, how: str, **more: Any) -> dict[str, Any]:
    return {RUN_CASE: case.name, "phase": PHASES[case.phase], HOW: how, **more, "date": now(), **where.fields}
