"""Rung: pure. Epochs, flags and poison of two ranks that live in one process, over the same bytes."""

from __future__ import annotations

import ctypes
import ctypes.util
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tpkernels.symmetric import signals
from tpkernels.symmetric.signals import (
    AtomicWords,
    GroupPoisoned,
    OrderedWords,
    PeerGone,
    PeerTimeout,
    Signals,
    Words,
    control_bytes,
    reached,
    words_over,
    words_refused,
    wrapped,
)

OPERATIONS = ("nothing", "gather", "scatter")
INT32 = st.integers(-(2**31), 2**31 - 1)
WORDS = [OrderedWords, pytest.param(AtomicWords, marks=pytest.mark.skipif(
    ctypes.util.find_library("atomic") is None, reason="libatomic is not installed"))]  # fmt: skip
Pair = tuple[Signals, Signals]


class Clock:
    """Time for one rank: each look at it takes an hour, or none where a rank is to wait for as long as it takes.

    Args:
        seconds_per_look: how far it goes each time.
        events: what happens at some look, by its number.
    """

    def __init__(self, seconds_per_look: float = 3600.0, events: dict[int, Callable[[], object]] | None = None) -> None:
        self._step, self._events = seconds_per_look, events or {}
        self.num_looks = 0

    def __call__(self) -> float:
        self.num_looks += 1
        self._events.get(self.num_looks, lambda: None)()
        return self.num_looks * self._step


def pair_over(words: Callable[[memoryview], Words], pids: tuple[int, int], clock: Clock | None = None) -> Pair:
    """Two ranks, called 4 and 7, each with a mapping of its own of the same memory."""
    size = control_bytes(2)
    fd = os.memfd_create("test")
    os.ftruncate(fd, 2 * mmap.PAGESIZE)
    ranks = []
    for rank in range(2):
        memory = memoryview(mmap.mmap(fd, 2 * mmap.PAGESIZE))
        areas = [words(memory[owner * mmap.PAGESIZE :][:size]) for owner in range(2)]
        ranks.append(Signals(areas, rank, pids, (4, 7), "tp", OPERATIONS, timeout_seconds=0.3))
        ranks[-1].clock = clock or Clock()
    os.close(fd)
    return ranks[0], ranks[1]


@pytest.fixture(params=WORDS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return pair_over(request.param, (os.getpid(), os.getpid()))


@pytest.fixture
def ended_pid() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@given(INT32, st.integers(0, 2**31 - 1))
def test_what_is_at_most_half_the_numbers_ahead_is_reached(expected: int, ahead: int) -> None:
    seen = wrapped(expected + ahead)
    assert reached(seen, expected)
    assert reached(expected, seen) == (ahead == 0)


@given(st.integers(-(2**40), 2**40))
def test_wrapped_is_the_stored_int32(epoch: int) -> None:
    assert wrapped(epoch) == ctypes.c_int32(epoch & 0xFFFFFFFF).value


def test_the_limit() -> None:
    assert wrapped(2**31) == -(2**31) and wrapped(2**31 - 1) == 2**31 - 1
    assert reached(wrapped(2**31), 2**31 - 1) and not reached(2**31 - 1, wrapped(2**31))


@pytest.mark.parametrize("words", WORDS)
def test_words_hold_every_int32(words: type[OrderedWords] | type[AtomicWords]) -> None:
    memory = bytearray(64)
    over = words(memoryview(memory))
    for index, value in ((0, 1), (3, -1), (15, -(2**31)), (14, 2**31 - 1)):
        over.store(index, value)
        assert over.load(index) == value
        assert int.from_bytes(memory[4 * index : 4 * index + 4], sys.byteorder, signed=True) == value
    assert over.load(1) == 0, "its neighbours are left alone"


def test_a_notified_peer_does_not_wait(pair: Pair) -> None:
    mine, theirs = pair
    mine.notify(1, 5)
    for epoch in (5, 4):
        theirs.wait(0, epoch, 1)
    with pytest.raises(PeerTimeout):
        theirs.wait(0, 6, 1)


def test_a_flag_is_for_one_peer_only(pair: Pair) -> None:
    mine, _ = pair
    mine.notify(1, 5)
    with pytest.raises(PeerTimeout):
        mine.wait(1, 5, 1)


def test_waiting_ends_with_the_signal(pair: Pair) -> None:
    mine, theirs = pair
    mine.clock = clock = Clock(0.0, {5: lambda: theirs.notify(0, 1)})
    mine.wait(1, 1, 1)
    assert clock.num_looks == 5


def test_a_wait_is_over_when_its_bound_is(pair: Pair) -> None:
    """0.3 s: of looks of 0.125 s each the first begins, and the fourth is 0.375 s later."""
    mine, _ = pair
    mine.clock = clock = Clock(0.125)
    with pytest.raises(PeerTimeout):
        mine.wait(1, 1, 1)
    assert clock.num_looks == 4


def test_epochs_across_the_limit(pair: Pair) -> None:
    mine, theirs = pair
    for epoch in range(2**31 - 3, 2**31 + 3):
        mine.notify(1, wrapped(epoch))
        theirs.wait(0, wrapped(epoch), 1)
        assert not reached(wrapped(epoch), wrapped(epoch + 1))


def test_an_announced_call_is_read_by_the_peer(pair: Pair) -> None:
    mine, theirs = pair
    mine.announce(0, (1, 2, -3))
    mine.announce(1, (7, 8, 9))
    assert theirs.announced(0, 0, 3) == (1, 2, -3) and theirs.announced(0, 1, 3) == (7, 8, 9)
    assert mine.announced(1, 0, 3) == (0, 0, 0), "the peer's own is another line"


def test_timeout_names_peer_operation_epochs_and_bound(pair: Pair) -> None:
    mine, theirs = pair
    theirs.notify(0, 41)
    with pytest.raises(PeerTimeout) as error:
        mine.wait(1, 42, 2)
    text = str(error.value)
    for part in ("rank 4 waited", "for rank 7", "scatter", "epoch 42", "seen 41", "no signal for 0.3 s", "group tp"):
        assert part in text, text
    assert "reset it on every rank" in text


def test_a_poisoned_group_refuses_on_every_rank(pair: Pair) -> None:
    mine, theirs = pair
    mine.raise_if_poisoned()
    with pytest.raises(PeerTimeout):
        mine.wait(1, 1, 2)
    for rank, number in ((mine, 4), (theirs, 7)):
        with pytest.raises(GroupPoisoned, match=rf"rank {number}: .*rank 4 waited in scatter, epoch 1 .*for rank 7"):
            rank.raise_if_poisoned()


def test_poison_ends_a_wait_before_its_bound(pair: Pair) -> None:
    mine, theirs = pair
    mine.clock = clock = Clock(0.0, {5: lambda: theirs.fail(1, 3)})
    with pytest.raises(GroupPoisoned, match="rank 7 failed in gather, epoch 3"):
        mine.wait(1, 3, 1)
    assert clock.num_looks >= 5


def test_the_first_failure_is_the_one_told(pair: Pair) -> None:
    mine, _ = pair
    mine.fail(1, 3)
    mine.fail(2, 4)
    with pytest.raises(GroupPoisoned, match="failed in gather, epoch 3"):
        mine.raise_if_poisoned()


def test_a_process_that_has_ended_is_noticed(ended_pid: int) -> None:
    mine, _ = pair_over(OrderedWords, (os.getpid(), ended_pid), Clock(0.0))
    with pytest.raises(PeerGone, match=r"for rank 7, which is gone"):
        mine.wait(1, 1, 1)


def test_what_an_ended_process_said_is_heard(ended_pid: int) -> None:
    mine, theirs = pair_over(OrderedWords, (os.getpid(), ended_pid))
    theirs.notify(0, 1)
    mine.wait(1, 1, 1)
    with pytest.raises(PeerGone):
        mine.wait(1, 2, 1)


def reset_both(pair: Pair, epochs: tuple[int, int]) -> tuple[int, int]:
    """Reset from two threads; returns what each rank was told."""
    told = [0, 0]
    for each in pair:
        each.clock = Clock(0.0)

    def reset(rank: int) -> None:
        told[rank] = pair[rank].reset(epochs[rank])

    thread = threading.Thread(target=reset, args=(1,))
    thread.start()
    reset(0)
    thread.join()
    return told[0], told[1]


def test_reset_goes_on_after_the_newest_call(pair: Pair) -> None:
    for epochs, newest in (((5, 6), 6), ((-(2**31), 2**31 - 1), -(2**31)), ((3, 3), 3)):
        pair[0].fail(1, epochs[0])
        assert reset_both(pair, epochs) == (newest, newest)
        pair[0].raise_if_poisoned()
        pair[1].raise_if_poisoned()


def test_reset_without_a_peer_names_it_and_leaves_the_poison(pair: Pair) -> None:
    mine, theirs = pair
    mine.fail(1, 5)
    with pytest.raises(PeerTimeout, match="is poisoned: rank 7 took no part in the reset"):
        mine.reset(5)
    with pytest.raises(GroupPoisoned):
        theirs.raise_if_poisoned()


def test_a_late_reset_does_not_clear_the_poison_alone(pair: Pair) -> None:
    """The peer gave up its reset before this rank came: nobody may go on before both have come together."""
    mine, theirs = pair
    mine.fail(1, 5)
    with pytest.raises(PeerTimeout):
        theirs.reset(4)
    with pytest.raises(PeerTimeout):
        mine.reset(5)
    for rank in (mine, theirs):
        with pytest.raises(GroupPoisoned):
            rank.raise_if_poisoned()


def test_this_machine_can_signal() -> None:
    assert words_refused() == ""
    assert isinstance(words_over(memoryview(bytearray(64))), OrderedWords | AtomicWords)


def test_a_machine_that_reorders_stores_needs_libatomic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "stores_are_ordered", lambda: False)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    assert "libatomic" in words_refused() and "not installed" in words_refused()


@pytest.mark.skipif(ctypes.util.find_library("atomic") is None, reason="libatomic is not installed")
def test_a_machine_that_reorders_stores_uses_libatomic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "stores_are_ordered", lambda: False)
    assert words_refused() == ""
    assert isinstance(words_over(memoryview(bytearray(64))), AtomicWords)
