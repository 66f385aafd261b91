"""Rung: gloo ranks. The pool that other tests run their ranks in: what fails in it is told, and costs no later test."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankError, RankPool


def sum_of_ranks() -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def fail_on_last_rank() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("planted")
    dist.barrier()  # the others wait for it


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
