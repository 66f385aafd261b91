"""Rung: gloo ranks, and fake ones. What a communicator does where its group is not gloo's, as NCCL's is not.

The branches for such groups make calls that gloo knows too: over a gloo group that is taken for another they must give
what gloo's own branches give. Every group here leaves out a rank, so that a call over the default group cannot pass.
What only GPUs check: NCCL itself.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.ranks.fake_ranks import Call, check_legal, fake_rank
from support.ranks.rank_pool import RankPool
from torch import Tensor
from tpkernels.exchange.communicator import Communicator

CASES = [(7, torch.bfloat16), (1, torch.float32), (0, torch.float32), (6, torch.int64)]
WORLD, MEMBERS = 4, [0, 1, 3]


def results(comm: Communicator, num_rows: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """What every exchange gives, of small whole numbers: any order of their sums is exact."""
    x = torch.arange(num_rows * 6).view(num_rows, 2, 3).remainder(13).add(comm.rank).to(dtype)
    # Every other column of a wider tensor.
    gaps = torch.stack((x, torch.full_like(x, -100)), -1)[..., 0]
    terms = [x, x + 1]
    mine = x[: max(0, min(num_rows - comm.rank * -(-num_rows // comm.size), -(-num_rows // comm.size)))]
    found = {
        "all_gather": comm.all_gather(x),
        "all_gather of a tensor with gaps": comm.all_gather(gaps),
        "all_gather_rows": comm.all_gather_rows(mine.contiguous(), num_rows),
        "reduce_scatter": comm.reduce_scatter(x),
        "reduce_scatter of a tensor with gaps": comm.reduce_scatter(gaps),
        "reduce_scatter_in_tree": comm.reduce_scatter_in_tree(terms),
        "all_reduce_in_tree_": comm.all_reduce_in_tree_(x.clone()),
        "all_reduce_": comm.all_reduce_(x.clone()),
        "all_reduce_max_": comm.all_reduce_max_(x.clone()),
        "broadcast_": comm.broadcast_(x.clone()),
        "broadcast_ into gaps": comm.broadcast_(gaps.clone()),
    }
    started, gapped = x.clone(), torch.stack((x, torch.full_like(x, -100)), -1)
    own, parts = x.flatten(), torch.arange(comm.size * 6 * num_rows).remainder(11).add(comm.rank).to(dtype)
    gathered, part, part_in_tree = own.new_empty(comm.size * len(own)), torch.empty_like(own), torch.empty_like(own)
    for pending in (
        comm.start_all_reduce(started),
        comm.start_all_reduce(gapped[..., 0]),
        comm.start_all_gather(own, gathered),
        comm.start_reduce_scatter(parts, part),
        comm.start_reduce_scatter(parts, part_in_tree, in_tree=True),
    ):
        pending.wait()
    return {
        **found,
        "start_all_reduce": started,
        "start_all_reduce within a tensor with gaps": gapped,
        "start_all_gather": gathered,
        "start_reduce_scatter": part,
        "start_reduce_scatter in a tree": part_in_tree,
    }


Results = dict[str, Tensor]


def all_results(comm: Communicator) -> Results:
    return {
        f"{name} of {num_rows} rows of {dtype}": y
        for num_rows, dtype in CASES
        for name, y in results(comm, num_rows, dtype).items()
    }


def by_both_branches() -> tuple[Results, Results]:
    group = dist.new_group(MEMBERS)
    if dist.get_rank() not in MEMBERS:
        return {}, {}
    gloo, other = Communicator(group), Communicator(group)
    assert gloo.is_gloo
    other.is_gloo = False
    return all_results(gloo), all_results(other)


@pytest.fixture(scope="module")
def both(ranks: RankPool) -> list[tuple[Results, Results]]:
    """Of every rank, what the branches for gloo give and the others."""
    return ranks.run(by_both_branches, WORLD)


def test_the_branches_for_nccl_give_what_those_for_gloo_give(both: list[tuple[Results, Results]]) -> None:
    for rank, (gloo, other) in enumerate(both):
        assert len(gloo) == len(other) == (len(CASES) * 16 if rank in MEMBERS else 0)
        for what, want in gloo.items():
            assert other[what].dtype == want.dtype and other[what].shape == want.shape, what
            assert torch.equal(other[what], want), what


def over_fake_groups() -> list[tuple[list[Call], Results]]:
    answers = []
    for rank in range(WORLD):
        with fake_rank(rank, WORLD) as recorder:
            group = dist.new_group(MEMBERS)
            found = {}
            if rank in MEMBERS:
                comm = Communicator(group)
                assert not comm.is_gloo
                found = all_results(comm)
            answers.append((recorder.calls, found))
    return answers


def test_every_exchange_over_a_group_that_is_not_gloos(ranks: RankPool, both: list[tuple[Results, Results]]) -> None:
    (answers,) = ranks.run(over_fake_groups, 1)
    check_legal([calls for calls, _ in answers])
    assert {call.members for calls, _ in answers for call in calls} == {tuple(MEMBERS)}
    for (_, fake), (gloo, _) in zip(answers, both, strict=True):
        assert fake.keys() == gloo.keys()
        for what, y in fake.items():
            assert (y.shape, y.dtype) == (gloo[what].shape, gloo[what].dtype), what


@pytest.mark.parametrize("broken", ["operation", "length", "message"])
def test_calls_that_do_not_fit_are_found(broken: str) -> None:
    """The check itself must be able to fail."""

    def call(operation: str, length: int, peer: int | None = None) -> Call:
        return Call(operation, "1", (0, 1), ((length, torch.float32),), None, peer)

    good = [[call("allreduce_", 3), call("send", 5, 1)], [call("allreduce_", 3), call("recv_", 5, 0)]]
    check_legal(good)
    bad = {
        "operation": [good[0], [call("_allgather_base_", 3), good[1][1]]],
        "length": [good[0], [call("allreduce_", 4), good[1][1]]],
        "message": [good[0], [good[1][0], call("recv_", 4, 0)]],
    }
    with pytest.raises(AssertionError):
        check_legal(bad[broken])
