"""Rung: interpreter, in one to four processes. Signals between ranks inside kernels: data, claims, counts.

The interpreter runs the programs of a launch one after another, so that a wait for a program that has not started would
end at its bound here. How waits end in vain: test_signal_verdicts.py. What order compiled code keeps is in
test_signals_ptx.py; that GPUs keep it too, only GPUs show.
"""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from support.ranks.signal_area import CALL, DATA_OFFSET, NUM_ELEMENTS, Area, begin_kernel

pytest.importorskip("triton")

from tpkernels.launch import jit, run, tl
from tpkernels.symmetric import signals_kernel as signals
from tpkernels.symmetric.signals_kernel import (
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


def all_worlds(by_default: int) -> pytest.MarkDecorator:
    """Groups of one to four ranks, of which one is not slow."""
    marks = {world: () if world == by_default else pytest.mark.slow for world in (1, 2, 3, 4)}
    return pytest.mark.parametrize("world", [pytest.param(world, marks=mark) for world, mark in marks.items()])


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
def meet_kernel(control: tl.int64, call: tl.tensor) -> None:
    p_control = control_at(control)
    epoch = newest_epoch(p_control) + 1
    barrier(p_control, epoch, call, True)
    item = claim(p_control)
    if is_last_claim(item, 0):
        end_launch(p_control, epoch, 0)


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
