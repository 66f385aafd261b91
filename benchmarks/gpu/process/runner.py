"""Run one case in a process group of its own, end it at its limit, and say how it ended.

Whatever a case does, it costs that case alone: a crash, an illegal access, a hang, an exit at any place. Its output
goes to a log, of which the last lines are kept in its row. If this process is killed, the case ends itself (case.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.gpu.declared import OVERLAPS, Case
from benchmarks.gpu.process.case import PASSED, WRONG
from benchmarks.harness.revision import ROOT

_LAST_LINES = 15
_LINE_CHARACTERS = 300
# How faulthandler begins what it prints, and each thread's part of it.
_OVER_TIME, _FIRST_OF_THREAD = "Timeout (", "(most recent call first):"
# A process whose device hangs may not die of SIGKILL; it is left behind.
_LONGEST_DYING_SECONDS = 20.0
# Where a hanging case is printed this long before it is ended.
_TRACE_SECONDS = 2.0

ENVIRONMENT: Mapping[str, str] = {
    OVERLAPS: "1",  # several ranks on one GPU
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # co-located ranks have two streams each
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        how: "passed", "wrong", "crashed", "hung", or "cut" by the end of the time or by Ctrl-C.
        seconds: that it took.
        last_lines: of its output.
    """

    how: str
    seconds: float
    last_lines: tuple[str, ...]


@contextlib.contextmanager
def beside(case: Case, rows: Path, log: Path) -> Iterator[None]:
    """Run a case beside others, until it has ended or the block does; how it ends is of no interest."""
    with tempfile.TemporaryFile() as output:
        process = _start(case, rows, output, case.limit)
        try:
            yield
        finally:
            _end(process)
            _keep(output, log, case.name)


def run(case: Case, rows: Path, log: Path, seconds_left: float) -> Outcome:
    """Run a case, for at most its limit and the seconds that are left.

    Args:
        case: what to run.
        rows: the file that the case appends to.
        log: the file that its whole output is appended to.
        seconds_left: until everything ends.

    Raises:
        KeyboardInterrupt: Ctrl-C; the case has been ended.
    """
    limit = min(case.limit, seconds_left)
    begin = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = _start(case, rows, output, limit)
        try:
            code = process.wait(limit)
            how = {PASSED: "passed", WRONG: "wrong"}.get(code, "crashed")
        except subprocess.TimeoutExpired:
            code, how = None, "hung" if limit == case.limit else "cut"
        finally:
            _end(process)
            seconds = time.monotonic() - begin
            lines = _keep(output, log, case.name)
    if code is not None and code < 0:
        lines.append(f"ended by {signal.Signals(-code).name}")
    if how in ("hung", "cut"):
        lines.append(f"ended at its limit of {limit:.0f} s" if how == "hung" else "the time was over")
    return Outcome(how, seconds, tuple(lines))


def environment(case: Case) -> dict[str, str]:
    """Return the variables of a case: both packages are found, whether or not they are installed."""
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(paths), **case.environment}


def _start(case: Case, rows: Path, output: IO[bytes], limit: float) -> subprocess.Popen[bytes]:
    request = {
        "function": case.function,
        "arguments": dict(case.arguments),
        "rows": str(rows.absolute()),
        "hang_seconds": max(limit - _TRACE_SECONDS, limit / 2),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu.process.case", json.dumps(request)],
        cwd=ROOT,
        env=environment(case),
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process with all it has started, also what it left behind when it ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_LONGEST_DYING_SECONDS)


def _keep(output: IO[bytes], log: Path, name: str) -> list[str]:
    """Append the output to the log; return its last lines, or where the main thread was when its time was over."""
    output.seek(0)
    text = output.read().decode(errors="replace")
    with log.open("a") as file:
        file.write(f"==== {name}\n{text}\n")
    lines = [line.rstrip()[:_LINE_CHARACTERS] for line in text.splitlines() if line.strip()]
    # The innermost call comes first, and the main thread last.
    threads = [place for place, line in enumerate(lines) if line.endswith(_FIRST_OF_THREAD)]
    if threads and any(line.startswith(_OVER_TIME) for line in lines):
        return lines[threads[-1] : threads[-1] + _LAST_LINES]
    return lines[-_LAST_LINES:]
