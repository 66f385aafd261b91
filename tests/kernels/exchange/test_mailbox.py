"""Rung: gloo ranks. Messages between neighbours: order, sizes, full outboxes, silence."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from tpkernels.exchange.mailbox import Mailbox
from tpkernels.symmetric.signals import PeerTimeout


def message(number: int, sender: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(numel) % 50 + number + 100 * sender).to(dtype)


def exchange(num_messages: int, slot_bytes: int, num_slots: int) -> None:
    """Every rank sends to both neighbours and receives from both, each in an order of its own, with delays."""
    box = Mailbox.open(dist.group.WORLD, slot_bytes, num_slots, timeout_seconds=600)
    rank, world = dist.get_rank(), dist.get_world_size()
    neighbours = sorted({(rank + 1) % world, (rank - 1) % world})
    delays = random.Random(rank)
    for number in range(num_messages):
        numel = (1, 7, 64, 100)[number % 4]
        for peer in neighbours:
            sent = message(number, rank, numel)
            box.send(peer, sent)
            sent.fill_(torch.nan)  # it is the sender's again
        time.sleep(delays.random() * 2e-3)
        for peer in reversed(neighbours):
            out = torch.full((numel,), torch.nan)
            box.receive(peer, out)
            assert torch.equal(out, message(number, peer, numel)), (number, peer)


@pytest.mark.parametrize(("world", "slot_bytes", "num_slots"), [(2, 4096, 2), (3, 4096, 1), (4, 64, 8)])
def test_messages_arrive_whole_and_in_order(ranks: RankPool, world: int, slot_bytes: int, num_slots: int) -> None:
    """Slots of 64 bytes hold 16 elements: the longest message takes 7 of them."""
    ranks.run(exchange, world, 30, slot_bytes, num_slots)


def run_ahead() -> list[float]:
    """Send once per slot, which waits for nobody, and once more."""
    box = Mailbox.open(dist.group.WORLD, 64, 4, timeout_seconds=600)
    got = []
    if dist.get_rank() == 0:
        for number in range(4):
            box.send(1, torch.tensor([float(number)]))
        dist.barrier()
        box.send(1, torch.tensor([4.0]))
    else:
        dist.barrier()
        out = torch.empty(1)
        for _ in range(5):
            box.receive(0, out)
            got.append(out.item())
    return got


def test_a_sender_runs_ahead_by_the_number_of_slots(ranks: RankPool) -> None:
    assert ranks.run(run_ahead, 2)[1] == [0.0, 1.0, 2.0, 3.0, 4.0]


def room() -> list[bool]:
    box = Mailbox.open(dist.group.WORLD, 1024, 2, timeout_seconds=600)
    if dist.get_rank() == 1:
        dist.barrier()
        box.receive(0, torch.empty(1))
        return []
    said = [box.has_room(1)]
    for i in range(2):
        box.send(1, torch.full((1,), float(i)))
        said.append(box.has_room(1))
    dist.barrier()
    box.wait_for_room(1)
    return [*said, box.has_room(1)]


def test_there_is_room_until_every_slot_is_taken_and_once_one_is_given_back(ranks: RankPool) -> None:
    assert ranks.run(room, 2)[0] == [True, True, False, True]


def kinds() -> None:
    box = Mailbox.open(dist.group.WORLD, 1024, 2, timeout_seconds=600)
    for dtype in (torch.bfloat16, torch.float64, torch.int64, torch.bool):
        if dist.get_rank() == 0:
            box.send(1, message(0, 0, 24, dtype).view(4, 6).t())
        else:
            out = torch.empty(6, 4, dtype=dtype)
            box.receive(0, out)
            assert torch.equal(out, message(0, 0, 24, dtype).view(4, 6).t())


def test_dtypes_and_strides(ranks: RankPool) -> None:
    ranks.run(kinds, 2)


def unlike(sent: torch.Tensor, expected: torch.Tensor) -> str:
    """Send one tensor to a rank that expects another; return what it says."""
    box = Mailbox.open(dist.group.WORLD, 1024, 2, timeout_seconds=600)
    if dist.get_rank() == 0:
        box.send(1, sent)
        return ""
    with pytest.raises(ValueError) as error:
        box.receive(0, expected)
    return str(error.value)


def test_another_size_is_an_error(ranks: RankPool) -> None:
    said = ranks.run(unlike, 2, torch.ones(5), torch.empty(4))[1]
    assert "rank 0 sent 5 elements of torch.float32, rank 1 expects 4 of torch.float32: make both the same" in said


@pytest.mark.parametrize(("sent", "expected"), [(torch.float16, torch.bfloat16), (torch.int32, torch.float32)])
def test_another_dtype_of_the_same_size_is_an_error(ranks: RankPool, sent: torch.dtype, expected: torch.dtype) -> None:
    said = ranks.run(unlike, 2, torch.ones(4, dtype=sent), torch.empty(4, dtype=expected))[1]
    assert f"rank 0 sent 4 elements of {sent}, rank 1 expects 4 of {expected}: make both the same" in said


def silence() -> str:
    box = Mailbox.open(dist.group.WORLD, 1024, 1, timeout_seconds=0.5)
    hours = itertools.count(0.0, 3600.0)
    box._returns.clock = lambda: next(hours)
    if dist.get_rank() == 0:
        box.send(1, torch.ones(1))
        with pytest.raises(PeerTimeout, match=r"waited in send, epoch 1 \(seen 0\) for rank 1, which gave no signal"):
            box.send(1, torch.ones(1))
    else:
        dist.barrier()
        return ""
    dist.barrier()
    return "said"


def test_a_full_outbox_waits_within_its_bound(ranks: RankPool) -> None:
    assert ranks.run(silence, 2)[0] == "said"
