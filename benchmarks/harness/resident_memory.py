"""How much memory a process holds, at most, while it does something; on Linux with glibc.

The resident set follows what is alive only if the heap gives back what is freed, and steps are only fast if it does
not. So memory is measured in steps of its own, with each block above 64 KiB mapped by itself (`follow_what_lives`), and
time in other steps, with a heap that keeps all it has had (`keep_what_is_freed`), both the same for every contestant.
Where there is no glibc, `follow_what_lives` changes nothing; where there is no /proc, all sizes are 0.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

# Of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_SMALLEST_MAPPED_BYTES = 64 << 10
# The largest that glibc takes; larger blocks are always mapped.
_LARGEST_THRESHOLD_BYTES = 32 << 20


def follow_what_lives() -> None:
    """Make the resident set what is alive: one arena, large blocks mapped and unmapped, the heap's end given back."""
    libc = _libc()
    if libc is not None:
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_MMAP_THRESHOLD, _SMALLEST_MAPPED_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _SMALLEST_MAPPED_BYTES)
        libc.malloc_trim(0)


def keep_what_is_freed() -> None:
    """Let the heap keep what is freed, as it does in a training process after some steps."""
    libc = _libc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def resident_bytes() -> int:
    """Return the bytes of memory that this process holds now."""
    return _status("VmRSS")


def forget_peak() -> None:
    """Begin to look for the largest resident set anew."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the largest resident set since `forget_peak`; memory that ranks share counts in each that touched it."""
    return _status("VmHWM")


def others_share_bytes() -> int:
    """Return how much of the resident shared memory counts for the other processes that map it.

    Less this, the sum over ranks has each page once. Shared memory is made once and stays, so it may be asked for later
    than the peak.
    """
    proportional = _field("/proc/self/smaps_rollup", "Pss_Shmem")
    return 0 if proportional is None else max(0, _status("RssShmem") - proportional)


def _status(name: str) -> int:
    return _field("/proc/self/status", name) or 0


def _field(path: str, name: str) -> int | None:
    """Return a size from a file of lines "name: number kB" in bytes; None where there is none."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def _libc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
