"""Rung: gloo ranks. Messages between two ranks while a third waits; clocks that are apart are found."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist
from support.ranks.rank_pool import RankPool

from tpengine.doctor import hosts


def messages() -> Any:
    return hosts.messages_between(0, 2, (64, 4096))


def test_messages_are_timed_on_both_ends_and_nowhere_else(ranks: RankPool) -> None:
    (first, at_first), second, (third, at_third) = ranks.run(messages, 3)
    assert second == ([], "") and at_first == at_third == ""
    assert [size for size, _ in first] == [size for size, _ in third] == [64.0, 4096.0]
    assert all(seconds > 0 for _, seconds in first)


def messages_over_a_broken_link() -> Any:
    """What rank 2 receives has another number in one place."""
    receive = dist.recv

    def broken(came: Any, *args: Any, **kwargs: Any) -> Any:
        answer = receive(came, *args, **kwargs)
        if dist.get_rank() == 2:
            came[5] = 77
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "recv", broken)
        found = hosts.messages_between(0, 2, (64, 4096))
    dist.barrier()  # all are in step
    return found


def test_wrong_bytes_are_said_with_what_came_and_nobody_waits(ranks: RankPool) -> None:
    (first, at_first), (_, elsewhere), (last, at_last) = ranks.run(messages_over_a_broken_link, 3)
    assert len(first) == len(last) == 2 and elsewhere == ""
    words = "64 bytes between ranks 0 and 2 came wrong: rank {} got 1 of 16 numbers wrong, number 5 as 77"
    assert (at_first, at_last) == (words.format(0), words.format(2))


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
