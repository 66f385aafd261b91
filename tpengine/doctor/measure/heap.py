"""The heap of a process that measures time: it keeps what is freed, as that of a training process after some steps."""

from __future__ import annotations

import ctypes

# Constants of malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# The largest value that glibc accepts; larger blocks are always mapped.
_LARGEST_THRESHOLD_BYTES = 32 << 20


def keep_what_is_freed() -> None:
    """Let the heap keep what is freed, as in a training process after some steps; without glibc do nothing."""
    found = libc()
    if found is not None:
        found.mallopt(M_MMAP_THRESHOLD, _LARGEST_THRESHOLD_BYTES)
        found.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def libc() -> ctypes.CDLL | None:
    """Return glibc; None where the C library is another."""
    try:
        found = ctypes.CDLL("libc.so.6")
    except OSError:
        return None
    return found if hasattr(found, "mallopt") and hasattr(found, "malloc_trim") else None
