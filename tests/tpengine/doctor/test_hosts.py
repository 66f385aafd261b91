"""Rung: gloo ranks. Messages between two ranks while a third waits; clocks that are apart are found."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist
from support.ranks.rank_pool import RankPool

from tpengine.doctor import hosts


def messages() -> Any:
    return hosts.messages_between(0, 2, (64, 4096))


def test_messages_are_timed_on_both_ends_and_nowhere_else(ranks: RankPool) -> None:
    first, second, third = ranks.run(messages, 3)
    assert second == [] and [size for size, _ in first] == [size for size, _ in third] == [64.0, 4096.0]
    assert all(seconds > 0 for _, seconds in first)


def clocks() -> Any:
    """Rank 2's clock is 100 s ahead."""
    right, original = time.time, hosts.time.time
    if dist.get_rank() == 2:
        hosts.time.time = lambda: right() + 100.0
    try:
        return hosts.clocks_apart([0, 1, 2])
    finally:
        hosts.time.time = original


def test_a_clock_that_is_ahead_is_found(ranks: RankPool) -> None:
    found, *others = ranks.run(clocks, 3)
    assert others == [[], []] and [of["rank"] for of in found] == [1, 2]
    near, far = found
    # A clock since 1970 is known to a quarter of a microsecond in float64.
    assert abs(near["seconds"]) <= near["within"] + 1e-6 and abs(far["seconds"] - 100.0) <= far["within"] + 1e-6
