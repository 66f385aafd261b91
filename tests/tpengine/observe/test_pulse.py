"""Rung: pure. Ranks that move, wait and die, over a counter in memory; time is a number that the test sets."""

from __future__ import annotations

from collections import Counter

from tpengine.observe.watch import Pulse

NEVER = float("-inf")


class Counters:
    def __init__(self) -> None:
        self.values: Counter[str] = Counter()
        self.num_requests = 0

    def add(self, key: str, amount: int) -> int:
        self.num_requests += 1
        self.values[key] += amount
        return self.values[key]


class Rank:
    """A rank whose signals and movements the test decides."""

    def __init__(self, store: Counters, now: list[float]) -> None:
        self.is_asked = self.is_moving = False
        self.pulse = Pulse(store, lambda: self.is_asked, lambda: self.is_moving, lambda: now[0])


def test_nothing_is_told_before_somebody_is_asked_to_stop() -> None:
    store = Counters()
    rank = Rank(store, [7.0])
    rank.is_moving = True
    rank.pulse.beat()
    assert rank.pulse.moved_at == NEVER and store.num_requests == 1 and not store.values["moves"]


def test_a_rank_that_moves_is_seen_by_those_that_wait() -> None:
    """Only one of three has been asked: the busy one has to tell without having heard the signal itself."""
    store, now = Counters(), [10.0]
    asked, waiting, busy = ranks = [Rank(store, now) for _ in range(3)]
    asked.is_asked = busy.is_moving = True
    for now[0] in range(10, 40):
        for rank in ranks:
            rank.pulse.beat()
    assert asked.pulse.moved_at == waiting.pulse.moved_at == busy.pulse.moved_at == 39.0


def test_when_all_wait_nothing_moves() -> None:
    store, now = Counters(), [10.0]
    ranks = [Rank(store, now) for _ in range(3)]
    ranks[0].is_asked = ranks[1].is_moving = ranks[2].is_moving = True
    for now[0] in range(10, 20):
        for rank in ranks:
            rank.pulse.beat()
    ranks[1].is_moving = False  # it waits, too
    for now[0] in range(20, 30):
        for rank in ranks[:2]:  # the third is dead
            rank.pulse.beat()
    assert {rank.pulse.moved_at for rank in ranks[:2]} <= {19.0, 20.0}


def test_a_store_that_is_gone_ends_the_thread_and_nothing_else() -> None:
    class Gone(Counters):
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("Connection reset by peer")

    rank = Rank(Gone(), [0.0])
    rank.pulse.run()
    assert rank.pulse.moved_at == NEVER
    with rank.pulse:
        pass
