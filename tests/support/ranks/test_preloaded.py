"""Rung: processes of their own. What ranks are forked from: they hash as users' ranks do, and it may die."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from support.programs import run_ranks
from support.ranks.preloaded import Preloaded, Program
from support.ranks.rank_pool import RankPool


def hash_of_a_string() -> int:
    return hash("x")


def test_neighbouring_ranks_hash_strings_differently(ranks: RankPool) -> None:
    first, second, third = ranks.run(hash_of_a_string, 3)
    assert first == third != second


def test_programs_of_neighbouring_ranks_do_as_well() -> None:
    first, second = run_ranks(2, "timeit", "-n", "1", "-r", "1", "print(hash('x'))")
    assert first.stdout.splitlines()[0] != second.stdout.splitlines()[0]


def test_a_process_that_has_died_is_replaced(tmp_path: Path) -> None:
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = Preloaded({**os.environ, **paths}, modules=())
    process._process.send_signal(signal.SIGKILL)
    process._process.wait()
    files = [str(tmp_path / name) for name in ("output", "errors")]
    _, connection = process.fork(Program("this", (), str(tmp_path), os.environ.copy(), *files))
    connection.recv()  # its process id
    assert connection.recv() == 0 and "Zen" in Path(files[0]).read_text()
