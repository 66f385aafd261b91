"""Rung: pure; gloo ranks for sums between ranks. Only a GPU checks sums that go over NCCL."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from torch import Tensor
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.tree import tree_sum


def random_terms(num: int, dtype: torch.dtype = torch.float32, rows: int = 12) -> list[Tensor]:
    return [torch.randn(rows, 5, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(num)]


def test_the_shape_of_the_tree() -> None:
    """Powers of two so far apart that every order of additions has other bits."""
    a, b, c, d, e = (torch.tensor([x]) for x in (0.25, 2.0**24, -(2.0**24), 0.5, 3.0))
    assert torch.equal(tree_sum([a, b, c]), (a + b) + c)
    assert torch.equal(tree_sum([a, b, c, d]), (a + b) + (c + d))
    assert torch.equal(tree_sum([a, b, c, d, e]), ((a + b) + (c + d)) + e)
    assert not torch.equal((a + b) + (c + d), ((a + b) + c) + d), "the case tells orders apart"


@pytest.mark.parametrize("num", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_terms_are_left_alone_and_sums_are_wide(num: int, dtype: torch.dtype) -> None:
    terms = random_terms(num, dtype)
    before = [term.clone() for term in terms]
    total = tree_sum(terms)
    assert total.dtype == (dtype if dtype in (torch.float64, torch.int64) else torch.float32)
    exact = torch.stack([term.double() for term in terms]).sum(0)
    torch.testing.assert_close(total.double(), exact, rtol=0, atol=num * torch.finfo(torch.float32).eps)
    assert all(torch.equal(term, same) for term, same in zip(terms, before, strict=True))
    into = torch.empty_like(terms[0])
    assert tree_sum(terms, out=into) is into and torch.equal(into, total.to(dtype))
    assert torch.equal(tree_sum(terms, out=terms[-1]), total.to(dtype)), "out may be a term"


@pytest.mark.parametrize("num", [1, 2, 4, 8])
def test_subtrees_of_a_power_of_two_give_the_same_bits(num: int) -> None:
    terms = random_terms(8)
    subtotals = [tree_sum(terms[first : first + num]) for first in range(0, 8, num)]
    assert torch.equal(tree_sum(subtotals), tree_sum(terms))


def check_sums_of(num_terms: int, dtype: torch.dtype, arena_bytes: int) -> None:
    comm = Communicator(dist.group.WORLD, arena_bytes=arena_bytes)
    each = num_terms // comm.size
    terms = random_terms(num_terms, dtype)
    mine = terms[comm.rank * each : (comm.rank + 1) * each]
    want = tree_sum(terms)
    num_rows = len(want) // comm.size
    rows = slice(comm.rank * num_rows, (comm.rank + 1) * num_rows)
    got = comm.reduce_scatter_in_tree(mine)
    assert got.dtype == want.dtype and torch.equal(got, want[rows])
    total = tree_sum(mine)
    assert torch.equal(comm.all_reduce_in_tree_(total), want)
    again = tree_sum(mine).t()
    comm.start_all_reduce_in_tree(again).wait()
    assert torch.equal(again, want.t()), "in place, whatever the strides"


@pytest.mark.parametrize("arena_bytes", [0, 4096, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_number_of_ranks_gives_the_same_bits(
    ranks: RankPool, world: int, dtype: torch.dtype, arena_bytes: int
) -> None:
    ranks.run(check_sums_of, world, 8, dtype, arena_bytes)


def check_odd_worlds() -> None:
    comm = Communicator(dist.group.WORLD)
    terms = random_terms(comm.size, rows=7)
    assert torch.equal(comm.all_reduce_in_tree_(terms[comm.rank].clone()), tree_sum(terms))


def test_three_ranks_and_rows_that_do_not_divide(ranks: RankPool) -> None:
    ranks.run(check_odd_worlds, 3)
