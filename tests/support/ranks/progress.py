"""Waits that last as long as somebody works: no limit in seconds decides what is right, however busy the machine is.

A process works while one of its threads, or of its descendants', runs, waits for a core or waits for a disk: on a busy
machine a thread that could run is found waiting for a core. Ranks that all wait for each other are found asleep. Those
that poll are seldom found awake, hence the balance below; those that spin for ever use up their CPU time in the end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOOK_SECONDS = 0.25
# For so long nobody may work before a wait is given up.
QUIET_SECONDS = 120.0
# Of all processes together: hundreds of times what a task takes.
MOST_CPU_SECONDS = 3000.0
# How many quiet looks one that finds somebody at work takes back.
_TAKEN_BACK = 4
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Progress:
    """Whether some processes, or any of their descendants, get on.

    Args:
        pids: the processes. Those that have ended do not work.

    Attributes:
        quiet_seconds: for how long nobody has worked, as far as `look` has seen.
        cpu_seconds: what all of them have used since the first look.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)
        self._looked_at = time.monotonic()
        self._cpu_seconds_before = _cpu_seconds(family(self._pids))
        self.quiet_seconds = self.cpu_seconds = 0.0

    def look(self) -> None:
        """Look once more; to be called every LOOK_SECONDS or so."""
        now = time.monotonic()
        # Whoever looks too late has not seen what they did meanwhile.
        passed = min(now - self._looked_at, 2 * LOOK_SECONDS)
        self._looked_at = now
        everyone = family(self._pids)
        if any(map(_works, everyone)):
            self.quiet_seconds = max(0.0, self.quiet_seconds - _TAKEN_BACK * passed)
        else:
            self.quiet_seconds += passed
        self.cpu_seconds = max(self.cpu_seconds, _cpu_seconds(everyone) - self._cpu_seconds_before)

    def is_over(self, quiet_seconds: float | None = None) -> bool:
        """Whether nothing more is to be expected, by default after QUIET_SECONDS."""
        limit = QUIET_SECONDS if quiet_seconds is None else quiet_seconds
        return self.quiet_seconds > limit or self.cpu_seconds > MOST_CPU_SECONDS

    def __str__(self) -> str:
        return f"nobody has worked for {self.quiet_seconds:.0f} s, {self.cpu_seconds:.0f} s of CPU time were used"


def finish(process: subprocess.Popen[Any]) -> tuple[Any, Any]:
    """Do what `process.communicate()` does, but kill a process if it makes no progress any more.

    Raises:
        AssertionError: it was, with what it had said.
    """
    progress = Progress([process.pid])
    while not progress.is_over():
        try:
            return process.communicate(timeout=LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            progress.look()
    kill_family(process.pid)
    output, errors = process.communicate()
    raise AssertionError(f"{process.args!r} hangs: {progress}: {output!r} {errors!r}")


def kill_family(pid: int) -> None:
    """Kill a process and all its descendants."""
    for member in family([pid]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


def run_program(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run`, for as long as the program works."""
    if options.pop("capture_output", False):
        options["stdout"] = options["stderr"] = subprocess.PIPE
    process = subprocess.Popen(command, **options)
    try:
        output, errors = finish(process)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def wait_until(is_so: Any, process: subprocess.Popen[Any], what: str) -> None:
    """Wait until `is_so()`, for as long as a process works.

    Raises:
        AssertionError: it has ended, or hangs, and it is not so.
    """
    progress = Progress([process.pid])
    while not is_so():
        has_ended = process.poll() is not None
        if has_ended and is_so():
            return
        progress.look()
        assert not has_ended and not progress.is_over(), f"{what}: exit code {process.returncode}: {progress}"
        time.sleep(0.05)


def family(pids: Sequence[int]) -> list[int]:
    """These processes and all their descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _fields(Path("/proc", entry, "stat"))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, waiting = [], list(pids)
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return found


def _fields(stat: Path) -> list[str]:
    """Return the fields behind the name, from the state on; empty if the process has ended."""
    try:
        return stat.read_text().rpartition(") ")[2].split()
    except OSError:
        return []


def _works(pid: int) -> bool:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return any(_fields(Path("/proc", str(pid), "task", thread, "stat"))[:1] in (["R"], ["D"]) for thread in threads)


def _cpu_seconds(pids: Sequence[int]) -> float:
    """Their own and that of the children they have waited for."""
    ticks = 0
    for pid in pids:
        ticks += sum(map(int, _fields(Path("/proc", str(pid), "stat"))[11:15]))
    return ticks / _TICKS_PER_SECOND
