"""Rung: pure, and child processes where a limit of the process or a mount is needed. Memory that processes share."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.ranks.progress import run_program
from tpkernels.symmetric import host_memory
from tpkernels.symmetric.host_memory import MemoryRefused, allocate, available_bytes, map_shared, open_of_peer
from tpkernels.symmetric.processes import host_identity, lives

MEGABYTE = 1 << 20


def open_descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def child(program: str, *before: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh Python, behind the command `before`."""
    command = [*before, sys.executable, "-c", textwrap.dedent(program)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return run_program(command, capture_output=True, text=True, env=environment)


def test_available_bytes_is_within_the_machine() -> None:
    free = available_bytes()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free <= total


VERSION_2 = ("memory.max", "memory.current", "inactive_file", "cgroup2", "cgroup2 rw")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "cgroup", "cgroup rw,memory")
MEMORY = 1000 * MEGABYTE


def machine_with(
    root: Path,
    version: tuple[str, ...],
    path: str,
    groups: dict[str, str | int],
    shown: str = "/",
    used: int = MEGABYTE,
) -> Path:
    """A tree of files as /proc and /sys are: a machine with so much memory, control groups by directory and limit.

    Args:
        path: of this process's group, as the kernel says.
        shown: the group that is mounted at the top, as mountinfo says.
    """
    limit, use, cache, kind, options = version
    place = root / "sys/fs/cgroup" / ("memory" if kind == "cgroup" else "")
    for group, value in groups.items():
        directory = place / group
        directory.mkdir(parents=True, exist_ok=True)
        (directory / limit).write_text(f"{value}\n")
        (directory / use).write_text(f"{used + MEGABYTE}\n")
        (directory / "memory.stat").write_text(f"anon 5\n{cache} {MEGABYTE}\n")
    proc = root / "proc/self"
    proc.mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {MEMORY // 1024} kB\n")
    (proc / "cgroup").write_text(f"0::{path}\n" if kind == "cgroup2" else f"9:cpu:/\n4:hugetlb,memory:{path}\n0::/\n")
    mounted = str(place.relative_to(root))
    (proc / "mountinfo").write_text(
        "23 1 0:22 / /proc rw - proc proc rw\n"
        # A mount without a source; what no kernel writes hides none of the next lines.
        "24 1 0:23 / /mnt rw - tmpfs  rw\n25 1 0:24 / / rw - tmpfs\n\n"
        f"30 24 0:26 {shown} /{mounted} rw,nosuid shared:4 - {kind} {options}\n"
    )
    return root


@pytest.mark.parametrize("version", [VERSION_1, VERSION_2], ids=["version 1", "version 2"])
@pytest.mark.parametrize(
    ("path", "groups", "shown", "least"),
    [
        # A job's own limit, below unlimited ones, without a namespace of control groups.
        ("/slurm/job_7/step_0", {"": "max", "slurm": "max", "slurm/job_7": "max", "slurm/job_7/step_0": 300}, "/", 300),
        # The limit of a group above it is less.
        ("/slurm/job_7/step_0", {"slurm": 200, "slurm/job_7": "max", "slurm/job_7/step_0": 300}, "/", 200),
        # Groups that are not this process's.
        ("/slurm/job_7", {"slurm/job_8": 100, "slurm/job_7/step_0": 100, "slurm/job_7": "max"}, "/", None),
        # In a namespace, or a container that mounts its own group alone.
        ("/", {"": 300}, "/", 300),
        ("/docker/abc", {"": 300}, "/docker/abc", 300),
        ("/docker/abc/inner", {"": 300, "inner": 200}, "/docker/abc", 200),
        ("/../other", {"": 300}, "/", 300),
        # A path that is not mounted here, and no limit at all.
        ("/user.slice/run", {"": 300}, "/", 300),
        ("/user.slice", {"user.slice": "max"}, "/", None),
    ],
)
def test_limits_of_all_control_groups_count(
    tmp_path: Path, version: tuple[str, ...], path: str, groups: dict[str, str | int], shown: str, least: int | None
) -> None:
    limits = {group: limit * MEGABYTE if isinstance(limit, int) else limit for group, limit in groups.items()}
    free = available_bytes(machine_with(tmp_path, version, path, limits, shown))
    assert free == (MEMORY if least is None else (least - 1) * MEGABYTE)


@pytest.mark.parametrize("version", [VERSION_1, VERSION_2], ids=["version 1", "version 2"])
def test_a_hierarchy_mounted_without_a_source_counts(tmp_path: Path, version: tuple[str, ...]) -> None:
    without_source = (*version[:4], f" {version[4].split()[1]}")
    root = machine_with(tmp_path, without_source, "/job", {"job": 300 * MEGABYTE})
    assert available_bytes(root) == 299 * MEGABYTE


def test_a_group_above_its_limit_leaves_nothing(tmp_path: Path) -> None:
    root = machine_with(tmp_path, VERSION_2, "/job", {"job": MEGABYTE}, used=5 * MEGABYTE)
    assert available_bytes(root) == 0
    (root / "proc/self/mountinfo").unlink()
    assert available_bytes(root) == MEMORY
    (root / "proc/meminfo").unlink()
    assert available_bytes(root) == 0


def test_nobody_changes_the_size_of_shared_memory() -> None:
    """It would end every rank by SIGBUS."""
    fd = allocate(MEGABYTE)
    try:
        peer = open_of_peer(os.getpid(), fd)
        try:
            for size in (0, MEGABYTE // 2, 2 * MEGABYTE):
                with pytest.raises(PermissionError):
                    os.ftruncate(peer, size)
            assert os.fstat(fd).st_size == MEGABYTE
        finally:
            os.close(peer)
    finally:
        os.close(fd)


def test_every_page_is_allocated_before_the_first_write() -> None:
    fd = allocate(MEGABYTE)
    try:
        status = os.fstat(fd)
        assert status.st_size == MEGABYTE and status.st_blocks * 512 >= MEGABYTE
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_a_peer_sees_the_same_bytes() -> None:
    fd = allocate(MEGABYTE)
    memory = map_shared(fd, MEGABYTE)
    memory[-4:] = b"mine"
    program = f"""
        from tpkernels.symmetric.host_memory import map_shared, open_of_peer
        memory = map_shared(open_of_peer({os.getpid()}, {fd}), {MEGABYTE})
        assert memory[-4:] == b"mine"
        memory[:4] = b"your"
    """
    done = child(program)
    os.close(fd)
    assert done.returncode == 0, done.stderr
    assert memory[:4] == b"your", "the mapping outlives the descriptor"


def test_nothing_is_left_behind() -> None:
    before = open_descriptors(), sorted(os.listdir("/dev/shm"))
    fd = allocate(MEGABYTE)
    memory = map_shared(fd, MEGABYTE)
    assert sorted(os.listdir("/dev/shm")) == before[1], "it has no name"
    os.close(fd)
    memory.close()
    with pytest.raises(MemoryRefused):
        allocate(1 << 50)
    assert (open_descriptors(), sorted(os.listdir("/dev/shm"))) == before


@pytest.mark.parametrize("num_bytes", [1 << 50, 1 << 80])
def test_more_than_the_machine_has_is_refused(num_bytes: int) -> None:
    with pytest.raises(MemoryRefused, match=rf"{num_bytes} bytes for each of 1 rank does not fit: \d+ bytes are free"):
        allocate(num_bytes)


def test_copies_count() -> None:
    free = available_bytes()
    with pytest.raises(MemoryRefused, match="for each of 8 ranks does not fit"):
        allocate(free // 4, 8)


def test_what_no_file_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1 << 81)
    before = open_descriptors()
    with pytest.raises(MemoryRefused, match="was refused"):
        allocate(1 << 80)
    assert open_descriptors() == before


def test_a_limit_of_the_process_is_an_error_and_no_signal() -> None:
    done = child(f"""
        import resource
        from tpkernels.symmetric.host_memory import MemoryRefused, allocate
        resource.setrlimit(resource.RLIMIT_FSIZE, ({MEGABYTE // 2}, {MEGABYTE // 2}))
        try:
            allocate({MEGABYTE})
        except MemoryRefused as error:
            print(error)
    """)
    assert done.returncode == 0, signal.Signals(-done.returncode) if done.returncode < 0 else done.stderr
    assert "EFBIG" in done.stdout and f"{MEGABYTE} bytes" in done.stdout


SMALL_TMPFS = f"""
    import ctypes, os, sys
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=1m"):
        sys.exit(77)
    def forbidden(name, flags=0):
        raise OSError(38, "a sandbox forbids it")
    os.memfd_create = forbidden
    from tpkernels.symmetric.host_memory import MemoryRefused, allocate, map_shared
    try:
        allocate({2 * MEGABYTE})
    except MemoryRefused as error:
        print(error)
    half = allocate({MEGABYTE // 2})
    memory = map_shared(half, {MEGABYTE // 2})
    memory[:] = b"x" * len(memory)
    try:
        allocate({MEGABYTE})
    except MemoryRefused as error:
        print(error)
    print("left", os.listdir("/dev/shm"))
"""


def test_a_file_system_that_is_too_small_is_an_error_and_no_signal() -> None:
    if child("", "unshare", "-m").returncode:
        pytest.skip("this user may not make a mount namespace: a small /dev/shm is not tested")
    done = child(SMALL_TMPFS, "unshare", "-m")
    if done.returncode == 77:
        pytest.skip("this user may not mount: a small /dev/shm is not tested")
    assert done.returncode == 0, done.stderr
    first, second, left = done.stdout.splitlines()
    assert "ENOSPC" in first and "ENOSPC" in second and left == "left []"


def test_neither_memfd_nor_tmpfs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(host_memory, "TMPFS", str(tmp_path / "none"))
    with pytest.raises(MemoryRefused, match=r"no memfd and no file in .*ENOENT"):
        allocate(MEGABYTE)


def test_memory_of_a_process_that_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(MemoryRefused, match=f"process {process.pid} cannot be opened: ENOENT"):
        open_of_peer(process.pid, 3)


def test_a_mapping_longer_than_the_memory_is_refused() -> None:
    fd = allocate(mmap.PAGESIZE)
    with pytest.raises(ValueError):
        map_shared(fd, 2 * mmap.PAGESIZE)
    os.close(fd)


def test_host_identity_is_the_same_for_processes_of_one_host() -> None:
    done = child("from tpkernels.symmetric.processes import host_identity; print(host_identity())")
    assert int(done.stdout) == host_identity()
    assert 0 <= host_identity() < 2**56


def test_host_identity_differs_where_process_numbers_do() -> None:
    before = "unshare", "--pid", "--fork"
    if child("", *before).returncode:
        pytest.skip("this user may not make a namespace of process numbers")
    done = child("from tpkernels.symmetric.processes import host_identity; print(host_identity())", *before)
    assert int(done.stdout) != host_identity()


def test_lives() -> None:
    assert lives(os.getpid())
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert lives(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not lives(process.pid), "a zombie will signal no more"
    process.communicate()
    assert not lives(process.pid)
