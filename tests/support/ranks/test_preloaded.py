"""Rung: processes of their own. What ranks are forked from: they hash as users' ranks do, and it may die."""

from __future__ import annotations

import os
import select
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from support.programs import run_ranks
from support.ranks.preloaded import Preloaded, Program, path_of_root
from support.ranks.progress import Progress
from support.ranks.rank_pool import RankPool


def hash_of_a_string() -> int:
    return hash("x")


def test_neighbouring_ranks_hash_strings_differently(ranks: RankPool) -> None:
    first, second, third = ranks.run(hash_of_a_string, 3)
    assert first == third != second


def test_programs_of_neighbouring_ranks_do_as_well() -> None:
    first, second = run_ranks(2, "timeit", "-n", "1", "-r", "1", "print(hash('x'))")
    assert first.stdout.splitlines()[0] != second.stdout.splitlines()[0]


@pytest.fixture
def process() -> Preloaded:
    """One whose template has imported nothing more."""
    return Preloaded(path_of_root(0), (), modules=())


def start(process: Preloaded, directory: Path, module: str, *arguments: str) -> tuple[int, Connection]:
    """Start a program; return its process id, and the connection to its guardian."""
    files = [str(directory / name) for name in ("output", "errors")]
    _, connection = process.fork(Program(str(directory), os.environ.copy(), module, arguments, *files))
    return connection.recv(), connection


def test_a_process_that_has_died_is_replaced(process: Preloaded, tmp_path: Path) -> None:
    before, ended = process.pid, os.pidfd_open(process.pid)
    os.kill(before, signal.SIGKILL)
    select.select([ended], [], [])
    _, connection = start(process, tmp_path, "this")
    assert connection.recv() == 0 and "Zen" in (tmp_path / "output").read_text()
    assert process.pid != before


def test_what_is_not_installed_stops_nobody_who_does_not_need_it(tmp_path: Path) -> None:
    process = Preloaded(path_of_root(0), (), modules=("a_module_that_nobody_has",))
    _, connection = start(process, tmp_path, "this")
    assert connection.recv() == 0 and "Zen" in (tmp_path / "output").read_text()


def test_a_program_does_not_outlive_who_started_it(process: Preloaded, tmp_path: Path) -> None:
    """A session that is killed lets go of all connections, and tells nobody."""
    pid, connection = start(process, tmp_path, "http.server", "0", "--bind", "127.0.0.1")
    os.kill(pid, 0)
    connection.close()
    progress = Progress([pid])
    while Path(f"/proc/{pid}").exists():
        progress.look()
        assert not progress.is_over(), "it serves on"
        time.sleep(0.01)
