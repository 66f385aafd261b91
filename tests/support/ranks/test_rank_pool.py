"""Rung: gloo ranks. The pool that other tests run their ranks in: what fails in it is told, and costs no later test."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.ranks.progress import Progress
from support.ranks.rank_pool import RankError, RankPool


def sum_of_ranks() -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def fail_on_last_rank() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("planted")
    dist.barrier()  # the others wait for it


def work_on_last_rank(said: str) -> None:
    """The others wait for it."""
    if dist.get_rank() == dist.get_world_size() - 1:
        while not Path(said).exists():
            pass
    dist.barrier()


def wait_for_nobody() -> None:
    time.sleep(3600)


def process() -> int:
    return os.getpid()


def lose_the_next_group() -> int:
    """As `process`; the group of the next task there cannot be made."""
    make = dist.init_process_group

    def fail(*_: Any, **__: Any) -> None:
        dist.init_process_group = make
        raise OSError("planted")

    dist.init_process_group = fail
    return os.getpid()


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """A pool of its own: these tests end its workers."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.mark.slow
def test_ranks_are_waited_for_as_long_as_one_works(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("support.ranks.progress.QUIET_SECONDS", 0.5)
    said, look = tmp_path / "said", Progress.look
    looks: list[float] = []

    def look_and_say(progress: Progress) -> None:
        look(progress)
        looks.append(progress.quiet_seconds)
        if len(looks) == 12:  # six times the limit
            said.touch()

    monkeypatch.setattr(Progress, "look", look_and_say)
    ranks.run(work_on_last_rank, 2, str(said))
    assert len(looks) >= 12


def test_ranks_that_all_wait_hang(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.ranks.progress.QUIET_SECONDS", 1.0)
    with pytest.raises(RankError, match=r"rank 0: no answer: nobody has worked for 1 s.*\nrank 1: no answer"):
        ranks.run(wait_for_nobody, 2)
    assert ranks.run(sum_of_ranks, 2) == [1, 1]


def test_a_failing_rank_is_named_and_the_next_task_runs(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1: .*planted"):
        ranks.run(fail_on_last_rank, 2)
    assert ranks.run(sum_of_ranks, 2) == [1, 1]


def test_no_worker_is_kept_whose_group_could_not_be_made(ranks: RankPool) -> None:
    """torch counts groups that it failed to make too: the next would have another name than on other ranks."""
    before = ranks.run(lose_the_next_group, 2)
    with pytest.raises(RankError, match=r"(?s)rank 0: .*planted.*rank 1: .*planted"):
        ranks.run(sum_of_ranks, 2)
    assert ranks.run(sum_of_ranks, 2) == [1, 1]
    assert not set(before) & set(ranks.run(process, 2))
