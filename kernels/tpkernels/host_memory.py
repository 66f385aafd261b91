"""Memory that processes of one host share: allocated for certain, opened by peers, leaving no name behind. No torch.

The traps this file exists for: a mapping larger than its file system can back succeeds and dies of SIGBUS at the first
write, so every page is allocated before it is mapped (posix_fallocate) and a refusal is an error that says what is
missing. A memfd has no limit of its own, and allocating more than the machine has would wake the out-of-memory killer,
so what is free is looked at first. And a name under /dev/shm outlives a killed run, so nothing here has a name: peers
open the memory through /proc/<pid>/fd.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

# Where memory without a name comes from if the kernel, or a sandbox, refuses memfd_create.
_TMPFS = "/dev/shm"


class MemoryRefused(RuntimeError):
    """The machine does not give the shared memory that was asked for; the message says how much and why."""


def available_bytes() -> int:
    """Bytes of memory that can still be allocated here, by the machine and by its control group; 0 where unknown.

    Without /proc nothing could be shared anyhow, and allocating blindly may take the machine down.
    """
    try:
        found = [_field("/proc/meminfo", "MemAvailable:") * 1024]
    except OSError:
        return 0
    for limit, used, stat, cache in _CONTROL_GROUP_FILES:
        try:
            # Pages of files that nobody has read lately count as used and are given up when memory is asked for.
            in_use = int(Path(used).read_text()) - _field(stat, cache)
            found.append(int(Path(limit).read_text()) - in_use)
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return min(found)


# Limit, use, statistics and the field of reclaimable pages: version 2, version 1.
_CONTROL_GROUP_FILES = (
    (
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory.current",
        "/sys/fs/cgroup/memory.stat",
        "inactive_file",
    ),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
        "total_inactive_file",
    ),
)


def _field(path: str, name: str) -> int:
    """The number after `name` in a file of lines "name number ..."; 0 without such a line."""
    for line in Path(path).read_text().splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    return 0


def allocate(num_bytes: int, num_copies: int = 1, free_bytes: int | None = None) -> int:
    """Allocate shared memory and return its file descriptor; every page of it exists.

    Args:
        num_bytes: size.
        num_copies: how many processes of this host allocate as much at the same time.
        free_bytes: what was free before any of them began; default what is free now.

    Raises:
        MemoryRefused: it does not fit in what is free, or a limit of the process or the file system forbids it.
    """
    what = f"shared memory of {num_bytes} bytes for each of {num_copies} rank{'s' if num_copies > 1 else ''}"
    free = available_bytes() if free_bytes is None else free_bytes
    if num_bytes * num_copies > free:
        raise MemoryRefused(f"{what} does not fit: {free} bytes are free")
    fd = _open_without_name(what)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except (OSError, OverflowError) as error:
        os.close(fd)
        raise MemoryRefused(f"{what} was refused: {_reason(error)}") from None
    return fd


def _open_without_name(what: str) -> int:
    try:
        return os.memfd_create("tpkernels", os.MFD_CLOEXEC)
    except (OSError, AttributeError):
        pass
    try:
        return os.open(_TMPFS, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except (OSError, AttributeError) as error:
        raise MemoryRefused(f"{what} was refused: no memfd and no file in {_TMPFS}: {_reason(error)}") from None


def open_of_peer(pid: int, fd: int) -> int:
    """Open the memory that process `pid` of this host holds as its descriptor `fd`; needs the same user.

    Raises:
        MemoryRefused: the process is gone, is another user's, or is hidden by a sandbox.
    """
    try:
        return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise MemoryRefused(f"the memory of process {pid} cannot be opened: {_reason(error)}") from None


def map_shared(fd: int, num_bytes: int) -> mmap.mmap:
    """Map the memory with its pages present; the mapping outlives the descriptor."""
    return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"{errno.errorcode.get(error.errno, error.errno)} ({os.strerror(error.errno)})"
    return repr(error)
