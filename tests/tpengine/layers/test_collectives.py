"""Rung: gloo ranks. Gather, reduce-scatter and all-reduce with their gradients, integer-valued, tolerance zero."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from torch import Tensor
from tpkernels.exchange.communicator import Communicator

from tpengine.layers.collectives import all_reduce, copy, gather, reduce_scatter

WORLDS = [1, 2, 3, 4]


def whole(rank: int, world: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An integer-valued tensor that differs on every rank."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 9, (3 * world, 5), generator=generator).to(dtype)


def check_pairs() -> None:
    comm = Communicator(dist.group.WORLD)
    everyone = [whole(r, comm.size) for r in range(comm.size)]
    mine = everyone[comm.rank]
    total = torch.stack(everyone).sum(0)
    rows = slice(3 * comm.rank, 3 * comm.rank + 3)

    x = mine[rows].clone().requires_grad_()
    y = gather(x, comm)
    assert torch.equal(y, torch.cat([everyone[r][3 * r : 3 * r + 3] for r in range(comm.size)]))
    y.backward(mine)
    assert x.grad is not None and torch.equal(x.grad, total[rows])

    x = mine.clone().requires_grad_()
    y = reduce_scatter(x, comm)
    assert torch.equal(y, total[rows])
    y.backward(mine[rows])
    want = torch.cat([everyone[r][3 * r : 3 * r + 3] for r in range(comm.size)])
    assert x.grad is not None and torch.equal(x.grad, want)

    x = mine.clone().requires_grad_()
    y = all_reduce(x, comm)
    assert torch.equal(y, total)
    y.backward(mine)
    assert x.grad is not None and torch.equal(x.grad, mine)

    x = mine.clone().requires_grad_()
    y = copy(x, comm)
    assert torch.equal(y, mine)
    y.backward(mine)
    assert x.grad is not None and torch.equal(x.grad, total)


def check_dtypes(dtype: torch.dtype) -> None:
    comm = Communicator(dist.group.WORLD)
    everyone = [whole(r, comm.size, dtype) for r in range(comm.size)]
    total = torch.stack(everyone).sum(0)
    rows = slice(3 * comm.rank, 3 * comm.rank + 3)
    assert torch.equal(comm.reduce_scatter(everyone[comm.rank].t().contiguous().t()), total[rows])
    assert torch.equal(comm.all_gather(total[rows]), total)
    assert torch.equal(comm.all_reduce_(everyone[comm.rank].clone()), total)
    assert torch.equal(comm.all_reduce_max_(everyone[comm.rank].clone()), torch.stack(everyone).amax(0))


def check_back_to_back() -> None:
    """Fifty calls without a barrier: no call takes another call's data, also when a rank runs ahead."""
    comm = Communicator(dist.group.WORLD)
    for call in range(50):
        x = torch.full((2, 3), float(call * comm.size + comm.rank))
        y = comm.all_gather(x)
        assert y[:, 0].tolist() == [call * comm.size + r for r in range(comm.size) for _ in range(2)]
        z = comm.reduce_scatter(torch.full((comm.size, 4), float(call)))
        assert torch.equal(z, torch.full((1, 4), float(call * comm.size)))


def check_same_bits() -> None:
    """Sums are taken in rank order: permuting what the ranks hold permutes nothing else, repeating changes no bit."""
    comm = Communicator(dist.group.WORLD)
    x = torch.randn(4 * comm.size, 1000, generator=torch.Generator().manual_seed(comm.rank))
    terms = [torch.randn(4 * comm.size, 1000, generator=torch.Generator().manual_seed(r)) for r in range(comm.size)]
    want = terms[0].clone()
    for term in terms[1:]:
        want += term
    for _ in range(5):
        assert torch.equal(comm.reduce_scatter(x), want[4 * comm.rank : 4 * comm.rank + 4])


@pytest.mark.parametrize("world", WORLDS)
def test_pairs_and_their_gradients(ranks: RankPool, world: int) -> None:
    ranks.run(check_pairs, world)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_dtypes_and_strides(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(check_dtypes, 3, dtype)


def test_back_to_back_calls(ranks: RankPool) -> None:
    ranks.run(check_back_to_back, 4)


def test_sums_in_rank_order(ranks: RankPool) -> None:
    ranks.run(check_same_bits, 3)


def test_one_rank_copies_nothing() -> None:
    alone, x = Communicator(None), torch.ones(3)
    assert alone.all_gather(x) is x and alone.reduce_scatter(x) is x and gather(x, alone) is x
