"""Cases that are tests of rung GPU, run by pytest in a process of their own; each failure is a row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.harness.journal import append

_REASON_CHARACTERS = 300
# Why tests skip where there is none.
_WANTS_A_GPU = re.compile("needs a (CUDA )?GPU")


class _Reports:
    """Write a row for each test that fails, and count all."""

    def __init__(self, rows: Path) -> None:
        self._rows, self.counts = rows, Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        self.counts[report.outcome] += 1
        self.counts["without_gpu"] += report.skipped and _WANTS_A_GPU.search(str(report.longrepr)) is not None
        if report.failed:
            lines = [line for line in report.longreprtext.splitlines() if line.startswith("E")] or [report.longreprtext]
            reason = " ".join(" ".join(lines).split())[:_REASON_CHARACTERS]
            append(self._rows, {"case": f"test/{report.nodeid}", "check": f"failed: {reason}"})


def run(rows: Path, paths: Sequence[str], chosen: str) -> int:
    """Run the tests of some files whose names say that they are for a GPU; return 1 if one fails.

    Args:
        rows: where failures go.
        paths: files or folders of tests.
        chosen: pytest's expression for names, `-k`.

    Raises:
        RuntimeError: no test ran.
    """
    reports = _Reports(rows)
    # In this process: workers of pytest-xdist would each hold a part of the GPU's memory.
    pytest.main(["-n", "0", "-q", "-p", "no:cacheprovider", "-k", chosen, *paths], plugins=[reports])
    counts = {f"num_{outcome}": number for outcome, number in sorted(reports.counts.items())}
    num_failed, num_ran = reports.counts["failed"], reports.counts["passed"] + reports.counts["failed"]
    check = f"failed: {num_failed} of the {num_ran} tests that ran" if num_failed else "passed"
    if number := reports.counts["without_gpu"]:
        check = f"failed: {number} tests see no GPU"
    if not num_ran:
        check = "failed: no test ran"
    append(rows, {"case": f"tests/{'+'.join(Path(path).stem for path in paths)}", "check": check, **counts})
    if not num_ran:
        raise RuntimeError(f"no test ran: {counts or 'none was found'}")
    return int(check != "passed")
