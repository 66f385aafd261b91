"""The peak memory of a process while it does something; on Linux with glibc.

The resident set only follows live memory if the heap returns what is freed, but steps are only fast if it does not. So
memory is measured in separate steps, in which each block above 64 KiB is mapped by itself (`follow_what_lives`). Time
is measured in other steps, with a heap that keeps its memory (`keep_what_is_freed`). Both are the same for every
contestant. Without glibc, `follow_what_lives` changes nothing; without /proc, all sizes are 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from tpengine.doctor.measure.heap import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, libc
from tpengine.doctor.measure.heap import keep_what_is_freed as keep_what_is_freed

# A constant of malloc.h.
_M_ARENA_MAX = -8
_SMALLEST_MAPPED_BYTES = 64 << 10


def follow_what_lives() -> None:
    """Make the resident set follow live memory: one arena, large blocks mapped and unmapped, the heap trimmed."""
    found = libc()
    if found is not None:
        found.mallopt(_M_ARENA_MAX, 1)
        found.mallopt(M_MMAP_THRESHOLD, _SMALLEST_MAPPED_BYTES)
        found.mallopt(M_TRIM_THRESHOLD, _SMALLEST_MAPPED_BYTES)
        found.malloc_trim(0)


def peak_of(step: Callable[[], object]) -> int:
    """Run a step; return the peak memory of this process in it.

    Of memory that ranks share, each page is counted once over all ranks.
    """
    follow_what_lives()
    forget_peak()
    step()
    return peak_bytes() - others_share_bytes()


def resident_bytes() -> int:
    """Return the bytes of memory that this process holds now."""
    return _status("VmRSS")


def forget_peak() -> None:
    """Reset the peak of the resident set."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the peak resident set since `forget_peak`; shared memory counts in each rank that has touched it."""
    return _status("VmHWM")


def others_share_bytes() -> int:
    """Return the part of the resident shared memory that is attributed to the other processes that map it.

    Subtract it, and the sum over ranks counts each page once. Shared memory is created once and stays, so this may be
    called later than the peak.
    """
    proportional = _field("/proc/self/smaps_rollup", "Pss_Shmem")
    return 0 if proportional is None else max(0, _status("RssShmem") - proportional)


def _status(name: str) -> int:
    return _field("/proc/self/status", name) or 0


def _field(path: str, name: str) -> int | None:
    """Return a size from a file of lines "name: number kB" in bytes; None if there is none."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None
