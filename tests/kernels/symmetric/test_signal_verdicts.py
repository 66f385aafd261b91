"""Rung: interpreter, in one to four processes. How waits inside kernels end in vain: timeouts, other calls, poison.

What signals carry when all goes well: test_signals_kernel.py.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import CountMutations
from support.kernels.compiled import CACHE_VARIABLE, modules_of
from support.ranks.rank_pool import RankPool
from support.ranks.signal_area import CALL, LIMIT_NS, Area, begin_kernel

pytest.importorskip("triton")

from tpkernels.launch import jit, tl
from tpkernels.symmetric import device_clock
from tpkernels.symmetric import signals_kernel as signals
from tpkernels.symmetric.device_clock import NS_PER_SECOND
from tpkernels.symmetric.signals_kernel import MISMATCH, TIMED_OUT, arrived_line, control_at, notify, rank_of, wait
from triton.runtime.errors import InterpreterError

# How long a counted poll takes, and how many are too many.
POLL_NS = 50_000
MOST_POLLS = LIMIT_NS // POLL_NS


class Endless(Exception):
    """A wait has taken more polls than a test waits for."""


class Polls:
    """Counts the polls of waits that did not end at once; `with Polls() as polls: ...; polls.count`.

    Args:
        poll_ns: how far a poll moves the clock that bounds the waits.
        module: the signals that wait.
        most: how many polls are too many; the next one raises Endless.
    """

    def __init__(self, poll_ns: int = POLL_NS, module: Any = signals, most: int = MOST_POLLS) -> None:
        self.poll_ns, self.count, self._module, self._most = poll_ns, 0, module, most

    def __enter__(self) -> Polls:
        self._before = self._module._rest, self._module._now_ns
        self._module._rest, self._module._now_ns = self._poll, lambda: 2**40 + self.poll_ns * self.count
        return self

    def _poll(self) -> None:
        self.count += 1
        if self.count > self._most:
            raise Endless
        time.sleep(0)

    def __exit__(self, *_: object) -> None:
        self._module._rest, self._module._now_ns = self._before


@jit
def wait_kernel(control: tl.int64, epoch: tl.tensor, call: tl.tensor, FIRST: tl.constexpr, LAST: tl.constexpr) -> None:
    """Wait for what ranks FIRST, ..., LAST - 1 send."""
    p_control = control_at(control)
    for peer in range(FIRST, LAST):
        wait(p_control, peer, arrived_line(peer, 1), epoch, call)


@jit
def notify_kernel(control: tl.int64, peer: tl.tensor, epoch: tl.tensor, call: tl.tensor) -> None:
    p_control = control_at(control)
    notify(p_control, peer, arrived_line(rank_of(p_control), 1), epoch, call)


def run_without_the_last_rank(limit_ns: int) -> tuple[list[int], list[int], list[int], int]:
    """Verdicts of a first call, of one after it, the poison line, and polls. The last rank never makes the first."""
    area = Area(epoch=5, limit_ns=limit_ns if dist.get_rank() == 0 else LIMIT_NS)
    absent = area.world - 1
    with Polls() as polls:
        if area.rank != absent:
            area.launch(wait_kernel, 6, CALL, FIRST=absent, LAST=absent + 1)
    first = area.verdict
    dist.barrier()
    area.launch(begin_kernel, 0, CALL)
    dist.barrier()
    return first, area.verdict, area.poison, polls.count


@pytest.mark.by_default("3")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_rank_that_never_comes(interpreters: RankPool, world: int) -> None:
    """Rank 0's patience ends, and everybody is told the same; the absent rank when it begins its next call."""
    outcomes = interpreters.run(run_without_the_last_rank, world, 100 * POLL_NS)
    line = signals.ARRIVED + signals.MAX_SPLITS * (world - 1) + 1
    verdict = [TIMED_OUT, 0, world - 1, line, 6, 5, CALL]
    for rank, (first, later, poison, polls) in enumerate(outcomes):
        assert first == ([0] * 7 if rank == world - 1 else verdict)
        assert later == poison == verdict
        assert polls == (0 if rank == world - 1 else polls)
    assert outcomes[0][3] == 100, "its own bound"
    assert all(polls < MOST_POLLS for *_, polls in outcomes), "the others are ended by poison"


# Copies of the signals, which may be broken, and a kernel that waits.
WAIT_KERNEL = """\
from tpkernels.launch import jit, tl
from {signals_kernel} import control_at, wait_for_epoch

@jit
def wait_kernel(control: tl.int64, line, epoch, call):
    wait_for_epoch(control_at(control), 0, line, epoch, call)
"""
# What is broken, where it stands, and what stands there instead.
CLOCK_MUTATIONS = {
    "a limit that is ignored": (">= limit_ns", ">= 2**62"),
    "a clock that is read once": ("_now_ns() - start", "start - start"),
    "a comparison that is reversed": (">= limit_ns", "< limit_ns"),
    "a limit in microseconds": (">= limit_ns", ">= limit_ns // 1000"),
    "a wait that begins with the clock": (
        "        start = _now_ns()\n        polls",
        "        start = limit_ns - limit_ns\n        polls",
    ),
    "no before yes": ('sys") == 1', 'sys") == 0'),
    "an answer from another word": ("+ _NO_AND_YES_WORD", "+ _WORLD_WORD"),
    "copies that are not waited for longer": ("limit_ns = limit_ns * _MAX_WORLD if", "limit_ns = limit_ns if"),
    "peers that are waited for as copies are": (" if (line >= _FETCHED) & (line < _PUBLISHED) else limit_ns", ""),
    "a wait that never looks": ("_is_late(p_control, start, limit_ns)\n        if", "False\n        if"),
    "a lock that is waited for without a look": ("_is_late(p_control, start, limit_ns)\n    tl", "False\n    tl"),
}


def polls_of_waits(old: str, new: str, directory: Path) -> dict[str, int]:
    """Return how many polls waits in vain take, limited to 5 s, of signals in which something is replaced.

    A wait has the time that polls take, whether a copy or a peer is waited for, and a lock that nobody opens: then a
    second wait of as long follows the first. 0 if it never ends.
    """
    source = Path(str(signals.__file__)).read_text()
    assert not old or source.count(old) == 1, f"not once in the source: {old}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(directory))
        modules = modules_of({"signals_kernel": source.replace(old, new), "kernels": WAIT_KERNEL})
    broken, kernel = modules["signals_kernel"], modules["kernels"].wait_kernel
    found = {}
    peer, copy = signals.ARRIVED + 1, signals.FETCHED + 1
    for name, poll_ns, line, is_locked in (
        ("polls of 1 s", NS_PER_SECOND, peer, False),
        ("polls of 3 s", 3 * NS_PER_SECOND, peer, False),
        ("a copy", NS_PER_SECOND, copy, False),
        ("a lock", NS_PER_SECOND, peer, True),
    ):
        area = Area(epoch=5, limit_ns=5 * NS_PER_SECOND)
        area.line(signals.POISON)[signals.VERDICT_WORDS] = int(is_locked)
        with Polls(poll_ns, broken, 200) as polls:
            try:
                area.launch(kernel, line, 6, CALL)
                assert area.verdict[0] == TIMED_OUT
                found[name] = polls.count
            except InterpreterError as error:
                if "Endless" not in str(error):
                    raise
                found[name] = 0
    return found


POLLS_OF_WAITS = {"polls of 1 s": 5, "polls of 3 s": 2, "a copy": 5 * signals.MAX_WORLD, "a lock": 10}


def test_a_wait_ends_by_the_clock_however_slow_its_polls_are(interpreters: RankPool, tmp_path: Path) -> None:
    assert interpreters.run(polls_of_waits, 1, "", "", tmp_path) == [POLLS_OF_WAITS]


@pytest.mark.slow
def test_broken_limits_of_waits_are_noticed(
    interpreters: RankPool, count_mutations: CountMutations, tmp_path: Path
) -> None:
    survivors = []
    for name, (old, new) in CLOCK_MUTATIONS.items():
        (found,) = interpreters.run(polls_of_waits, 1, old, new, tmp_path)
        if found == POLLS_OF_WAITS:
            survivors.append(name)
    count_mutations("the device signals", len(CLOCK_MUTATIONS) - len(survivors), len(CLOCK_MUTATIONS))
    assert survivors == []


def looks_of_a_wait(polls_per_look: int) -> tuple[int, int]:
    """Return polls and looks at the clock of a wait in vain of 5 s, of which a poll takes one."""
    area, looks = Area(epoch=5, limit_ns=5 * NS_PER_SECOND), 0
    with Polls(NS_PER_SECOND) as polls, pytest.MonkeyPatch.context() as patch:
        now_ns = signals._now_ns

        def counted() -> int:
            nonlocal looks
            looks += 1
            return int(now_ns())

        patch.setattr(signals, "_now_ns", counted)
        patch.setattr(signals, "_POLLS_PER_LOOK", polls_per_look)
        area.launch(wait_kernel, 6, CALL, FIRST=0, LAST=1)
    assert area.verdict[0] == TIMED_OUT
    return polls.count, looks


@pytest.mark.parametrize(("polls_per_look", "expected"), [(1, (5, 7)), (4, (8, 4)), (64, (64, 3))])
def test_the_clock_is_read_seldom(interpreters: RankPool, polls_per_look: int, expected: tuple[int, int]) -> None:
    """When the wait begins, once in so many polls, and when the wait for one's own poison begins, which has come."""
    assert interpreters.run(looks_of_a_wait, 1, polls_per_look) == [expected]


def verdict_of_a_wait_across_32_bits() -> list[int]:
    """Return the verdict of a wait in vain whose clock passes 2**31 ns; each look is a second later."""
    area = Area(epoch=5, limit_ns=5 * NS_PER_SECOND)
    seconds = itertools.count(2**31 // NS_PER_SECOND - 1)
    clock = SimpleNamespace(monotonic_ns=lambda: next(seconds) * NS_PER_SECOND)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_clock, "time", clock)
        area.launch(wait_kernel, 6, CALL, FIRST=0, LAST=1)
    assert next(seconds) == 2**31 // NS_PER_SECOND - 1 + 7, "5 s, and where the two waits begin"
    return area.verdict


def test_a_wait_on_a_machine_that_runs_for_long(interpreters: RankPool) -> None:
    (verdict,) = interpreters.run(verdict_of_a_wait_across_32_bits, 1)
    assert verdict[0] == TIMED_OUT


def run_other_calls() -> tuple[list[int], int]:
    area = Area(epoch=5)
    with Polls() as polls:
        number = CALL + (area.rank == area.world - 1)
        for peer in range(area.world):
            area.launch(notify_kernel, peer, 6, number)
        area.launch(wait_kernel, 6, number, FIRST=0, LAST=area.world)
    # A rank may have compared nothing but equal numbers before it heard of the others'.
    dist.barrier()
    area.launch(begin_kernel, 0, CALL)
    dist.barrier()
    assert area.poison == area.verdict
    return area.verdict, polls.count


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_that_make_different_calls(interpreters: RankPool, world: int) -> None:
    """Two ranks may notice at once, and then ranks hear one or the other; each verdict is of a pair that differs."""
    for verdict, polls in interpreters.run(run_other_calls, world):
        reason, waiter, awaited, line, expected, seen, call = verdict
        assert (reason, expected, seen) == (MISMATCH, 6, 6)
        assert (waiter == world - 1) != (awaited == world - 1)
        assert call == CALL + (waiter == world - 1)
        assert line == signals.ARRIVED + signals.MAX_SPLITS * awaited + 1
        assert polls < MOST_POLLS


def run_on_other_parity() -> list[int]:
    """The peer is a call ahead, which is another one: that is no mismatch of this one."""
    area = Area(epoch=5)
    if area.rank == 0:
        area.launch(notify_kernel, 1, 6, CALL)
        area.launch(notify_kernel, 1, 7, CALL + 1)
    dist.barrier()
    if area.rank == 1:
        area.launch(wait_kernel, 6, CALL, FIRST=0, LAST=1)
    dist.barrier()
    return area.verdict


def test_a_peer_that_is_a_call_ahead(interpreters: RankPool) -> None:
    assert interpreters.run(run_on_other_parity, 2) == [[0] * 7] * 2


FOREIGN = [TIMED_OUT, 1, 0, 9, 3, 2, 55]


def run_poisoned() -> tuple[list[int], list[int], int]:
    """Rank 0 is poisoned before it waits for all that never comes: verdict, poison, polls."""
    area = Area(epoch=5)
    if area.rank == 0:
        area.line(signals.POISON)[:8] = torch.tensor([*FOREIGN, 1], dtype=torch.int32)
    dist.barrier()
    with Polls() as polls:
        if area.rank == 0:
            area.launch(wait_kernel, 6, CALL, programs=3, FIRST=0, LAST=area.world)
    dist.barrier()
    return area.verdict, area.poison, polls.count


@pytest.mark.parametrize("world", [2, 3])
def test_poison_ends_all_waits(interpreters: RankPool, world: int) -> None:
    """Each by one poll, and with the words of the one that gave up first, on which no other rank's depend."""
    (verdict, poison, polls), *others = interpreters.run(run_poisoned, world)
    assert verdict == poison == FOREIGN
    assert polls == 3 * world
    assert others == [([0] * 7, [0] * 7, 0)] * (world - 1), "whose verdict comes from the rank that gave up"


def run_second_to_give_up() -> tuple[list[int], list[int]]:
    """Rank 1 has a verdict already, of which rank 0 has not heard when its own wait ends."""
    area = Area(epoch=5, limit_ns=20 * POLL_NS)
    if area.rank == 1:
        area.line(signals.POISON)[:8] = torch.tensor([*FOREIGN, 1], dtype=torch.int32)
    dist.barrier()
    if area.rank == 0:
        area.launch(wait_kernel, 6, CALL, FIRST=1, LAST=2)
    dist.barrier()
    if area.rank == 1:
        area.launch(begin_kernel, 0, CALL)
    dist.barrier()
    return area.verdict, area.poison


def test_the_first_verdict_stays(interpreters: RankPool) -> None:
    mine, theirs = interpreters.run(run_second_to_give_up, 2)
    assert mine == ([TIMED_OUT, 0, 1, signals.MAX_SPLITS + 1, 6, 5, CALL],) * 2
    assert theirs == (FOREIGN, FOREIGN)


def run_while_another_writes() -> tuple[int, bool]:
    """A rank gives up whose own line another has locked, and died, or has locked and written nothing yet."""
    area = Area(epoch=5, limit_ns=20 * POLL_NS)
    area.line(signals.POISON)[signals.VERDICT_WORDS] = 1
    with Polls() as polls:
        area.launch(wait_kernel, 6, CALL, FIRST=0, LAST=1)
    return area.verdict[0], polls.count <= 40


def test_who_gives_up_is_told_so_whoever_else_does(interpreters: RankPool) -> None:
    assert interpreters.run(run_while_another_writes, 1) == [(TIMED_OUT, True)]
