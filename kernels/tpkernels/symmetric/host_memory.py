"""Memory that processes of one host share: every page is allocated, peers open it, and no name is left. No torch.

Three problems that this file solves. A mapping larger than its file system can back succeeds and dies of SIGBUS at the
first write: so every page is allocated before it is mapped (posix_fallocate), and a refusal is an error that says what
is missing. A memfd has no limit of its own, and allocating more than the machine has would start the out-of-memory
killer: so free memory is checked first. A name under /dev/shm outlives a killed run: so nothing here has a name; peers
open the memory through /proc/<pid>/fd.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

# Where memory without a name is created if the kernel, or a sandbox, refuses memfd_create.
TMPFS = "/dev/shm"
_ROOT = Path("/")


class MemoryRefused(RuntimeError):
    """The machine does not give the requested shared memory; the message says how much and why."""


def available_bytes(root: Path = _ROOT) -> int:
    """Return the bytes that can still be allocated, by the machine and its control groups; 0 if unknown.

    A job's limit may be set on its group or on any group above it: the smallest remainder counts. Without /proc nothing
    could be shared anyway, and allocating without knowing may bring the machine down.

    Args:
        root: directory that contains proc and the mounts; tests give another.
    """
    try:
        found = [_field(root / "proc/meminfo", "MemAvailable:") * 1024]
    except OSError:
        return 0
    for directory, files in _control_groups(root):
        try:
            # Cached pages of files not read lately count as used, but are released when memory is needed.
            in_use = int((directory / files.used).read_text()) - _field(directory / "memory.stat", files.cache)
            found.append(int((directory / files.limit).read_text()) - in_use)
        except (OSError, ValueError):  # no memory controller, or "max"
            continue
    return max(min(found), 0)


class _Files(NamedTuple):
    """Names of a control group's limit and use, and of the field of reclaimable pages in memory.stat."""

    limit: str
    used: str
    cache: str


_VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Files("memory.max", "memory.current", "inactive_file")


def _control_groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield this process's group and those above it, as far as they are mounted, in both versions' hierarchies."""
    try:
        # "number:controllers:path"; version 2 has no controllers.
        entries = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        mounts = _mounts_of_control_groups((root / "proc/self/mountinfo").read_text())
    except (OSError, ValueError):
        return
    for _, controllers, path in entries:
        is_version_2 = not controllers
        if not is_version_2 and "memory" not in controllers.split(","):
            continue
        for shown, place in mounts[is_version_2]:
            # In a container without a namespace of control groups the path is the host's, and the mount is part of it.
            below = PurePosixPath(path)
            relative = below.relative_to(shown) if below.is_relative_to(shown) else PurePosixPath()
            if ".." in relative.parts:  # a group outside of the namespace
                relative = PurePosixPath()
            for group in (relative, *relative.parents) if relative.parts else (relative,):
                yield root / place.lstrip("/") / group, _VERSION_2 if is_version_2 else _VERSION_1


def _mounts_of_control_groups(mountinfo: str) -> dict[bool, list[tuple[str, str]]]:
    """Return (path of the top group, where it is mounted) of hierarchies that may limit memory; True: version 2's."""
    mounts: dict[bool, list[tuple[str, str]]] = {False: [], True: []}
    for line in mountinfo.splitlines():
        mount, _, kind = line.partition(" - ")
        # Fields are separated by one blank; a field may be empty (the source of a mount made without one).
        of_mount, of_kind = mount.split(" "), kind.split(" ")
        if len(of_mount) < 5 or len(of_kind) < 3:  # not a line that a kernel writes
            continue
        shown, place = of_mount[3:5]
        file_system, _, options = of_kind[:3]
        if file_system == "cgroup2" or (file_system == "cgroup" and "memory" in options.split(",")):
            mounts[file_system == "cgroup2"].append((shown, place))
    return mounts


def _field(path: Path, name: str) -> int:
    """Return the number after `name` in a file of lines "name number ..."; 0 without such a line."""
    for line in path.read_text().splitlines():
        words = line.split()
        if words[:1] == [name]:
            return int(words[1])
    return 0


def allocate(num_bytes: int, num_copies: int = 1, free_bytes: int | None = None) -> int:
    """Allocate shared memory and return its file descriptor; every page of it is allocated.

    Args:
        num_bytes: size.
        num_copies: how many processes of this host allocate the same amount at the same time.
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
    _seal(fd)
    return fd


def _seal(fd: int) -> None:
    """Fix the size: if a peer made the memory smaller, every rank would die of SIGBUS."""
    try:
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except (OSError, AttributeError):  # not a memfd; only these have seals
        pass


def _open_without_name(what: str) -> int:
    try:
        return os.memfd_create("tpkernels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError):
        pass
    try:
        return os.open(TMPFS, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except (OSError, AttributeError) as error:
        raise MemoryRefused(f"{what} was refused: no memfd and no file in {TMPFS}: {_reason(error)}") from None


def open_of_peer(pid: int, fd: int) -> int:
    """Open the memory that process `pid` of this host holds as descriptor `fd`; the user must be the same.

    Raises:
        MemoryRefused: the process is gone, is another user's, or is hidden by a sandbox.
    """
    try:
        return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise MemoryRefused(f"the memory of process {pid} cannot be opened: {_reason(error)}") from None


def map_shared(fd: int, num_bytes: int) -> mmap.mmap:
    """Map the memory with its pages present; the mapping stays after the descriptor is closed."""
    return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"{errno.errorcode.get(error.errno, error.errno)} ({os.strerror(error.errno)})"
    return repr(error)
