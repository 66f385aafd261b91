"""Rung: interpreter, in one to four processes. Signals between ranks inside kernels: data, claims, timeouts, poison.

The interpreter runs the programs of a launch one after another, so that a wait for a program that has not started would
end at its bound here. What order compiled code keeps is in test_signals_ptx.py; that GPUs keep it too, only GPUs show.
"""

from __future__ import annotations

import itertools
import random
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
from torch import Tensor

pytest.importorskip("triton")

from tpkernels.launch import jit, run, tl
from tpkernels.symmetric import device_clock
from tpkernels.symmetric import signals_kernel as signals
from tpkernels.symmetric.device_clock import NS_PER_SECOND
from tpkernels.symmetric.memory import HostMemory
from tpkernels.symmetric.signals_kernel import (
    MISMATCH,
    TIMED_OUT,
    arrived_line,
    barrier,
    begin,
    claim,
    control_at,
    count_done,
    end_launch,
    is_last_claim,
    memory_of,
    newest_epoch,
    notify,
    rank_of,
    wait,
)
from triton.runtime.errors import InterpreterError

# More than any test waits for in vain, and few enough to end a test that would hang.
LIMIT_NS = 100 * NS_PER_SECOND
# How long a counted poll takes, and how many are too many.
POLL_NS = 50_000
MOST_POLLS = LIMIT_NS // POLL_NS
CALL = 77
# What a rank sends to each, in one, two or four items.
NUM_ELEMENTS = 32
DATA_OFFSET = 1 << 14


def all_worlds(by_default: int) -> pytest.MarkDecorator:
    """Groups of one to four ranks, of which one is not slow."""
    marks = {world: () if world == by_default else pytest.mark.slow for world in (1, 2, 3, 4)}
    return pytest.mark.parametrize("world", [pytest.param(world, marks=mark) for world, mark in marks.items()])


class Area:
    """This rank's control area and two generations of data, as the host sets them up.

    Attributes:
        rank, world: as the group's.
        words: the control area, int32.
        record: what kernels tell this rank's host.
        data: [2, world, NUM_ELEMENTS], what each rank sends here.
    """

    def __init__(self, epoch: int = 0, limit_ns: int = LIMIT_NS) -> None:
        self._memory = memory = HostMemory.allocate(dist.group.WORLD, 1 << 15)
        self.rank, self.world = memory.rank, memory.world
        self.words = memory.block(self.rank, 0, (signals.NUM_LINES * signals.LINE_WORDS,), torch.int32)
        self.record = torch.zeros(signals.LINE_WORDS, dtype=torch.int32)
        self.data = self.data_of(self.rank)
        self.data.fill_(torch.nan)
        flags = self.words[: signals.POISON * signals.LINE_WORDS].view(-1, signals.LINE_WORDS)
        flags[:, 0] = epoch
        state = self.line(signals.STATE)
        state[:4] = torch.tensor([epoch, -1, self.rank, self.world])
        state[signals.LIMIT_NS : signals.LIMIT_NS + 2].view(torch.int64).fill_(limit_ns)
        state[signals.NO_AND_YES + 1] = 1
        table = memory.block(self.rank, 4 * signals.TABLE * signals.LINE_WORDS, (signals.MAX_WORLD + 1,), torch.int64)
        table[: self.world] = torch.tensor(memory.addresses)
        table[-1] = self.record.data_ptr()
        dist.barrier()

    def line(self, number: int) -> Tensor:
        return self.words[number * signals.LINE_WORDS :][: signals.LINE_WORDS]

    def address_of(self, rank: int) -> int:
        return self._memory.addresses[rank]

    def data_of(self, rank: int) -> Tensor:
        return self._memory.block(rank, DATA_OFFSET, (2, self.world, NUM_ELEMENTS), torch.float32)

    @property
    def verdict(self) -> list[int]:
        return self.record[: signals.VERDICT_WORDS].tolist()

    @property
    def poison(self) -> list[int]:
        return self.line(signals.POISON)[: signals.VERDICT_WORDS].tolist()

    def launch(self, kernel: Any, *arguments: Any, programs: int = 1, **constants: Any) -> None:
        run(kernel, (programs,), self.address_of(self.rank), *arguments, num_warps=4, **constants)


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
def exchange_kernel(
    control: tl.int64,
    p_out: tl.tensor,
    generation: tl.tensor,
    call: tl.tensor,
    seed: tl.tensor,
    WORLD: tl.constexpr,
    NUM_ITEMS: tl.constexpr,
    ITEM: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    """Send every rank NUM_ITEMS items by several programs, and copy what all ranks sent to p_out[WORLD, ...]."""
    p_control = control_at(control)
    epoch = begin(p_control, generation, call)
    rank = rank_of(p_control)
    o_item = tl.arange(0, ITEM)
    item = claim(p_control)
    while item < WORLD * NUM_ITEMS:
        peer, i = item // NUM_ITEMS, item % NUM_ITEMS
        p_there = memory_of(p_control, peer).to(tl.pointer_type(tl.float32)) + OFFSET // 4
        p_item = p_there + ((generation * WORLD + rank) * NUM_ITEMS + i) * ITEM
        tl.store(p_item + o_item, (seed + 100 * rank + 50 * peer + i * ITEM + o_item).to(tl.float32))
        if count_done(p_control, peer, NUM_ITEMS):
            notify(p_control, peer, arrived_line(rank, 1), epoch, call)
        item = claim(p_control)
    if is_last_claim(item, WORLD * NUM_ITEMS):
        p_here = memory_of(p_control, rank).to(tl.pointer_type(tl.float32)) + OFFSET // 4
        o_all = tl.arange(0, NUM_ITEMS * ITEM)
        for peer in range(WORLD):
            wait(p_control, peer, arrived_line(peer, 1), epoch, call)
            p_items = p_here + (generation * WORLD + peer) * NUM_ITEMS * ITEM
            # [NUM_ITEMS * ITEM]
            b_items = tl.load(p_items + o_all)
            tl.store(p_out + peer * NUM_ITEMS * ITEM + o_all, b_items)
            tl.store(p_items + o_all, float("nan"))
        end_launch(p_control, epoch, generation)


@jit
def claims_kernel(control: tl.int64, p_drawn: tl.tensor, num_items: tl.tensor) -> None:
    """Count at p_drawn[num_items + programs + 1] how often each number is drawn, and in the last word the ends."""
    p_control = control_at(control)
    item = claim(p_control)
    tl.atomic_add(p_drawn + item, 1)
    while item < num_items:
        item = claim(p_control)
        tl.atomic_add(p_drawn + item, 1)
    if is_last_claim(item, num_items):
        tl.atomic_add(p_drawn + num_items + tl.num_programs(0), 1)
        end_launch(p_control, 0, 0)


@jit
def draws_kernel(control: tl.int64, p_drawn: tl.tensor, num_draws: tl.tensor) -> None:
    p_control = control_at(control)
    for i in range(num_draws):
        tl.store(p_drawn + i, claim(p_control))


@jit
def counts_kernel(control: tl.int64, p_last: tl.tensor, peer: tl.tensor, num_tiles: tl.tensor) -> None:
    """Each program counts one tile, and says at its place of p_last whether it was the last."""
    p_control = control_at(control)
    if count_done(p_control, peer, num_tiles):
        tl.store(p_last + tl.program_id(0), 1)


@jit
def begin_kernel(control: tl.int64, generation: tl.tensor, call: tl.tensor, NEXT_MEETS: tl.constexpr = False) -> None:
    p_control = control_at(control)
    epoch = begin(p_control, generation, call)
    item = claim(p_control)
    if is_last_claim(item, 0):
        end_launch(p_control, epoch, generation, NEXT_MEETS)


@jit
def meet_kernel(control: tl.int64, call: tl.tensor) -> None:
    p_control = control_at(control)
    epoch = newest_epoch(p_control) + 1
    barrier(p_control, epoch, call, True)
    item = claim(p_control)
    if is_last_claim(item, 0):
        end_launch(p_control, epoch, 0)


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


def exchange(area: Area, i_call: int, num_items: int, programs: int) -> None:
    """A call, and a look at all that it brings; every rank's memory holds NaN wherever nothing is under way."""
    out = torch.full((area.world, NUM_ELEMENTS), torch.nan)
    constants = {"WORLD": area.world, "NUM_ITEMS": num_items, "ITEM": NUM_ELEMENTS // num_items, "OFFSET": DATA_OFFSET}
    area.launch(exchange_kernel, out, i_call % 2, CALL, 1000 * i_call, programs=programs, **constants)
    senders = 1000 * i_call + 100 * torch.arange(area.world)[:, None] + 50 * area.rank
    expected = (senders + torch.arange(NUM_ELEMENTS)).float()
    assert torch.equal(out, expected), f"call {i_call}: {out} for {expected}, record {area.verdict}"


def run_exchanges(epoch: int, num_calls: int, num_items: int, programs: int, most_seconds: float) -> None:
    area = Area(epoch)
    delays = random.Random(area.rank)
    for i_call in range(num_calls):
        if most_seconds and delays.random() < 0.5:
            time.sleep(delays.uniform(0, most_seconds))
        exchange(area, i_call, num_items, programs)
    last = epoch + num_calls
    assert area.line(signals.STATE)[0] == (last + 2**31) % 2**32 - 2**31
    for number in range(signals.CLAIMS, signals.TABLE):
        assert not area.line(number).any(), "counters are 0 between launches"
    assert not area.record.any()
    dist.barrier()


@all_worlds(by_default=3)
def test_what_is_read_after_a_wait_was_written_before_the_flag(interpreters: RankPool, world: int) -> None:
    interpreters.run(run_exchanges, world, 0, 6, 4, 3, 0.02)


@all_worlds(by_default=2)
def test_fifty_calls_back_to_back(interpreters: RankPool, world: int) -> None:
    """Calls use two generations in turn and no barrier; one program per rank suffices."""
    interpreters.run(run_exchanges, world, 0, 50, 1, 1, 0.0)


@all_worlds(by_default=3)
def test_epochs_wrap_around(interpreters: RankPool, world: int) -> None:
    interpreters.run(run_exchanges, world, 2**31 - 3, 6, 1, 2, 0.005)


def run_begins(kernel_name: str) -> list[tuple[float, float]]:
    """When this rank entered and left each call, by the clock that processes share."""
    area = Area()
    delays = random.Random(10 + area.rank)
    times = []
    for i_call in range(6):
        time.sleep(delays.uniform(0, 0.03))
        entered = time.monotonic()
        if kernel_name == "begin":
            area.launch(begin_kernel, 0, CALL, programs=2)
        elif kernel_name == "next meets":
            area.launch(begin_kernel, i_call % 2, CALL, programs=2, NEXT_MEETS=True)
        else:
            area.launch(meet_kernel, CALL)
        times.append((entered, time.monotonic()))
    assert not area.record.any(), area.verdict
    assert area.line(signals.STATE)[0] == 6
    dist.barrier()
    return times


@all_worlds(by_default=3)
@pytest.mark.parametrize("kernel_name", ["begin", "next meets", "meet"])
def test_nobody_overtakes(interpreters: RankPool, kernel_name: str, world: int) -> None:
    """A call on the previous call's generation begins with a barrier, or where the previous one has asked for it.

    The first call does not.
    """
    times = interpreters.run(run_begins, world, kernel_name)
    for i_call in range(0 if kernel_name == "meet" else 1, 6):
        last_entered = max(of_rank[i_call][0] for of_rank in times)
        assert all(of_rank[i_call][1] >= last_entered for of_rank in times), f"call {i_call}: {times}"


def run_claims(num_items: int, programs: int) -> None:
    area = Area()
    drawn = torch.zeros(num_items + programs + 1, dtype=torch.int32)
    for i_launch in range(1, 4):
        area.launch(claims_kernel, drawn, num_items, programs=programs)
        assert drawn.tolist() == [i_launch] * len(drawn), "every number once, and one last"
        assert not area.line(signals.CLAIMS).any()


@pytest.mark.parametrize(("num_items", "programs"), [(0, 1), (0, 3), (1, 4), (7, 1), (7, 3), (12, 5)])
def test_every_number_is_drawn_once(interpreters: RankPool, num_items: int, programs: int) -> None:
    interpreters.run(run_claims, 1, num_items, programs)


def run_shared_claims(num_draws: int) -> list[int]:
    """What this rank draws of rank 0's counter: ranks in the part of programs that run at once."""
    area = Area()
    drawn = torch.full((num_draws,), -1, dtype=torch.int32)
    dist.barrier()
    run(draws_kernel, (1,), area.address_of(0), drawn, num_draws, num_warps=4)
    dist.barrier()
    return drawn.tolist()


@pytest.mark.parametrize("world", [2, 3])
def test_every_number_is_drawn_once_by_programs_at_once(interpreters: RankPool, world: int) -> None:
    of_ranks = interpreters.run(run_shared_claims, world, 150)
    assert sorted(number for drawn in of_ranks for number in drawn) == list(range(150 * world))
    assert all(drawn == sorted(drawn) for drawn in of_ranks), "numbers only grow"


def run_counts(num_tiles: int) -> None:
    area = Area()
    for peer in (0, signals.MAX_WORLD - 1):
        for _ in range(3):
            last = torch.zeros(num_tiles, dtype=torch.int32)
            area.launch(counts_kernel, last, peer, num_tiles, programs=num_tiles)
            assert last.tolist() == [0] * (num_tiles - 1) + [1]
            assert not area.line(signals.DONE + peer).any()
    last = torch.zeros(num_tiles, dtype=torch.int32)
    area.launch(counts_kernel, last, 0, num_tiles + 1, programs=num_tiles)
    assert not last.any() and area.line(signals.DONE)[0] == num_tiles, "one is missing"
    area.launch(counts_kernel, last, 1, num_tiles, programs=num_tiles)
    assert last.tolist() == [0] * (num_tiles - 1) + [1], "peers are counted apart"
    assert area.line(signals.DONE)[0] == num_tiles


@pytest.mark.parametrize("num_tiles", [1, 2, 7])
def test_one_count_is_the_last(interpreters: RankPool, num_tiles: int) -> None:
    interpreters.run(run_counts, 1, num_tiles)


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
