"""Rung: gloo ranks. Memory that exists once: turns to write and to read, ranks that do not come."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from tpkernels.exchange.room import Room
from tpkernels.symmetric.host_memory import MemoryRefused
from tpkernels.symmetric.signals import PeerTimeout

NUMEL, TURNS = 100, 6


def take_turns(mutation: str) -> list[float]:
    """Every rank writes its part in each turn, with delays; return all values that were not those of the turn."""
    rank, world = dist.get_rank(), dist.get_world_size()
    room = Room.open(dist.group.WORLD, world * NUMEL * 4, timeout_seconds=600)
    parts = room.view(0, world * NUMEL, torch.float32).view(world, NUMEL)
    delays, wrong = random.Random(rank), []
    for turn in range(TURNS):
        slow = 0.05 if rank == turn % world else 0.0
        time.sleep(slow)
        parts[rank].fill_(turn + 1)
        if mutation != "read too early":
            room.meet(to_write=False)
        for other in range(world):
            time.sleep(slow + delays.random() * 1e-3)
            wrong += [x for x in parts[other].tolist() if x != turn + 1]
        if mutation != "written too early":
            room.meet(to_write=True)
    dist.barrier()
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_a_turn_sees_what_was_written_in_the_last_one(ranks: RankPool, world: int) -> None:
    assert ranks.run(take_turns, world, "none") == [[]] * world


@pytest.mark.parametrize("mutation", ["read too early", "written too early"])
def test_turns_that_do_not_wait_are_noticed(ranks: RankPool, mutation: str) -> None:
    assert any(ranks.run(take_turns, 2, mutation))


def alone() -> tuple[str, str]:
    """Rank 1 does not come; then rank 0 asks again."""
    room = Room.open(dist.group.WORLD, 64, timeout_seconds=0.01)
    said = []
    if dist.get_rank() == 0:
        for _ in range(2):
            with pytest.raises(RuntimeError) as caught:
                room.meet(to_write=True)
            said.append(f"{type(caught.value).__name__}: {caught.value}")
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError) as caught:
            room.meet(to_write=True)
        said = [str(caught.value)] * 2
    return said[0], said[1]


def test_a_rank_that_does_not_come_is_named(ranks: RankPool) -> None:
    (first, again), (other, _) = ranks.run(alone, 2)
    assert first.startswith(f"{PeerTimeout.__name__}: rank 0: group ")
    for text in (first, again, other):
        assert "rank 0 waited in a turn to write, epoch 1 (seen 0) for rank 1, which gave no signal for 0.01 s" in text


def too_large() -> str:
    with pytest.raises(MemoryRefused) as caught:
        Room.open(dist.group.WORLD, 1 << 50)
    return str(caught.value)


def test_memory_that_does_not_fit_is_refused_on_all_ranks(ranks: RankPool) -> None:
    """Only the first rank allocates."""
    for said in ranks.run(too_large, 2):
        assert said.startswith("rank 0: shared memory of ")
        assert "for each of 1 rank does not fit" in said
