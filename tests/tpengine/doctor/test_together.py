"""Rung: pure, ranks as threads over one store. What came of a look is the same on all ranks, whoever fails or is gone.

Ranks that really die are in tests/tpengine/commands/test_doctor.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from tpengine.distributed.launch import Launch
from tpengine.doctor import together
from tpengine.doctor.together import Answer, Together


def members(world: int) -> list[Together]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    return [
        Together(Launch(rank, world, rank, world), store, lambda: store, lambda _: None, lambda _: None)
        for rank in range(world)
    ]


def on_all(ranks: list[Together], call: Callable[[int, Together], Any]) -> list[Any]:
    """Call something on every rank at the same time."""
    answers: dict[int, Any] = {}

    def run(rank: int) -> None:
        answers[rank] = call(rank, ranks[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[rank] for rank in range(len(ranks))]


def test_all_ranks_have_all_answers() -> None:
    found = on_all(members(3), lambda rank, one: one.ask("look", lambda: {"rank": rank}, seconds=600))
    assert found == [[Answer({"rank": 0}), Answer({"rank": 1}), Answer({"rank": 2})]] * 3


def test_rank_0_alone_tells_what_is_looked_at_and_nothing_that_is_not_tried() -> None:
    store, told = dist.HashStore(), [[], []]  # type: ignore[attr-defined]
    ranks = [
        Together(Launch(rank, 2, rank, 2), store, lambda: store, lambda _: None, told[rank].append) for rank in range(2)
    ]

    def look(rank: int, one: Together) -> None:
        one.ask("facts", lambda: one.tell("of this host"), seconds=600)
        one.ask("links", lambda: fails_on(0, rank), seconds=600, needs_all=True)
        one.ask("sums", lambda: rank, seconds=600, needs_all=True)

    on_all(ranks, look)
    assert told == [["facts", "of this host", "links"], []]


def fails_on(failing: int, rank: int) -> int:
    if rank == failing:
        raise ValueError("no\nsuch thing")
    return rank


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_is_an_answer_and_what_needs_all_ranks_is_not_tried_any_more(failing: int) -> None:
    ranks = members(2)
    found = on_all(
        ranks, lambda rank, one: one.ask("links", lambda: fails_on(failing, rank), seconds=600, needs_all=True)
    )
    assert found[0] == found[1] and found[0][failing] == Answer(error="ValueError: no such thing")
    assert [one.broken for one in ranks] == [f"links failed on rank {failing}"] * 2
    assert on_all(ranks, lambda _, one: one.ask("more", lambda: 1, seconds=600, needs_all=True)) == [None, None]
    # What a rank does alone goes on.
    assert on_all(ranks, lambda _, one: one.ask("own", lambda: 1, seconds=600)) == [[Answer(1), Answer(1)]] * 2


def test_an_error_of_a_ranks_own_breaks_nothing() -> None:
    ranks = members(2)
    on_all(ranks, lambda rank, one: one.ask("own", lambda: fails_on(1, rank), seconds=600))
    assert [one.broken for one in ranks] == ["", ""] and not any(one.is_over for one in ranks)


def test_a_rank_that_has_died_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_GRACE_SECONDS", 1e9)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    first, _, third = ranks = members(3)
    for one in ranks:
        one.know({0: os.getpid(), 1: ended.pid, 2: os.getpid()})
    found = on_all([first, third], lambda _, one: one.ask("look", lambda: 1, seconds=600))
    assert found == [[Answer(1), Answer(error="the process died", is_gone=True), Answer(1)]] * 2
    assert first.is_over and third.is_over
    assert on_all([first, third], lambda _, one: one.ask("more", lambda: 1, seconds=600)) == [None, None]


def test_a_rank_that_is_silent_is_waited_for_until_the_look_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_GRACE_SECONDS", 0.0)
    first, second = members(2)
    (answer, missing) = first.ask("look", lambda: 1, seconds=0.1) or []
    assert answer == Answer(1) and missing.is_gone and "no answer" in missing.error
    # What rank 0 has decided counts, also for the rank that comes late.
    assert second.ask("look", lambda: 1, seconds=600) == [answer, missing] and second.is_over
