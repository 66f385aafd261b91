"""What tests cost: CPU seconds of processes and of all their descendants, whatever else the machine does."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat after the command's name: user and system time, own and of children that were waited for.
_TIMES = slice(11, 15)


def cpu_seconds(*pids: int) -> float:
    """CPU seconds of processes, of their descendants that live, and of those that have been waited for.

    Args:
        pids: the processes; this one, if none is named.
    """
    return sum(map(_ticks_of, pids or (os.getpid(),))) / _TICKS_PER_SECOND


def _ticks_of(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:  # it has ended meanwhile
        return 0
    return sum(map(int, fields[_TIMES])) + sum(_ticks_of(child) for thread in threads for child in _children_of(thread))


def _children_of(thread: Path) -> list[int]:
    try:
        return [int(child) for child in (thread / "children").read_text().split()]
    except OSError:
        # It has ended meanwhile; this one has not: without such a file nothing can be counted.
        if thread.name == str(os.getpid()):
            raise
        return []
