"""Rung: gloo ranks and interpreted ranks. Prepared matrices over the arena; every way of an all-reduce.

Exact, and the same bits however shards arrive.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.ranks.arena_ranks import hostile_communicator
from support.ranks.rank_pool import RankPool
from torch import Tensor
from tpkernels.exchange.arena import exchange_bytes, shard_rows
from tpkernels.exchange.communicator import Communicator
from tpkernels.fused.gather import gather_matmul
from tpkernels.fused.matmul_all_reduce import matmul_all_reduce
from tpkernels.fused.scatter import matmul_scatter
from tpkernels.launch import triton
from tpkernels.ops.matmul.host import PreparedMatrix, product, rows_are_independent

TOKENS, HIDDEN, FEATURES = 400, 256, 320


def digests_and_deliveries(num_calls: int) -> tuple[set[str], set[int], bool]:
    """Gather and multiply while another rank is late each time.

    Returns:
        The different bits of products and gathered rows; in how many deliveries shards came; whether one was allowed.
    """
    comm = Communicator(dist.group.WORLD, arena_bytes=exchange_bytes(TOKENS, 4 * HIDDEN, dist.get_world_size()))
    assert comm.arena is not None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    rows = [shard_rows(TOKENS, comm.size, rank) for rank in range(comm.size)]
    matrix = PreparedMatrix(torch.randn(HIDDEN, FEATURES, generator=generator), len(x[rows[0]]))
    deliveries: list[int] = []
    gather = comm.arena.gather

    def counted(*arguments: object, **options: object) -> object:
        deliveries.append(0)
        for delivery in gather(*arguments, **options):  # type: ignore[arg-type]
            deliveries[-1] += 1
            yield delivery

    comm.arena.gather = counted  # type: ignore[method-assign, assignment]
    digests = set()
    for call in range(num_calls):
        if call % comm.size == comm.rank:
            time.sleep(0.02)
        (y,), full = gather_matmul(x[rows[comm.rank]], [matrix], comm, TOKENS, "all_gather_matmul", keep=True)
        assert full is not None and torch.equal(full, x)
        torch.testing.assert_close(y, product(x, matrix), rtol=1e-4, atol=1e-4)
        digests.add(hashlib.sha256(y.numpy().tobytes()).hexdigest())
    return digests, set(deliveries), rows_are_independent(matrix, TOKENS, [len(x[r]) for r in rows])


def check_prepared_products_over_a_hostile_arena(num_calls: int) -> None:
    """Integers, tolerance zero: forward and dual, with NaN in all memory that nobody wrote and ranks that dawdle."""
    world = dist.get_world_size()
    arena_bytes = exchange_bytes(TOKENS, 4 * max(HIDDEN, FEATURES), world)
    comm = hostile_communicator(dist.group.WORLD, arena_bytes)
    rows = [shard_rows(TOKENS, world, rank) for rank in range(world)]
    for call in range(num_calls):
        generator = torch.Generator().manual_seed(call)
        x, w, dy = (
            torch.randint(-3, 4, shape, generator=generator).float()
            for shape in ((TOKENS, HIDDEN), (HIDDEN, FEATURES), (TOKENS, FEATURES))
        )
        forward, dual = (PreparedMatrix(m, len(x[rows[0]])) for m in (w, w.T))
        (y,), full = gather_matmul(x[rows[comm.rank]], [forward], comm, TOKENS, "all_gather_matmul", keep=True)
        dx = matmul_scatter([(dy, dual)], comm, "all_gather_matmul")
        assert full is not None and torch.equal(full, x)
        assert torch.equal(y, x @ w) and torch.equal(dx, (world * dy @ w.T)[rows[comm.rank]])


@pytest.mark.parametrize("world", [2, 3, 4])
def test_prepared_products_over_a_hostile_arena(ranks: RankPool, world: int) -> None:
    ranks.run(check_prepared_products_over_a_hostile_arena, world, 10)


@pytest.mark.parametrize("world", [2, 3])
def test_late_ranks_do_not_change_bits(ranks: RankPool, world: int) -> None:
    outcomes = ranks.run(digests_and_deliveries, world, 20)
    assert len(set.union(*(digests for digests, _, _ in outcomes))) == 1
    for _, deliveries, may_be_one in outcomes:
        assert deliveries == ({1, world} if may_be_one else {world})


def test_plain_matrices_are_never_taken_for_independent() -> None:
    matrix = torch.randn(HIDDEN, FEATURES)
    assert not rows_are_independent(matrix, TOKENS, [200, 200])
    # Too small for oneDNN.
    assert not rows_are_independent(PreparedMatrix(matrix[:8, :8], 8), 8, [4, 4])


def all_reduced() -> list[tuple[bool, bool, bool]]:
    """For each way: whether kernels ran, a rank added all ranks' results itself, and sums are right to the last bit."""
    found = []
    for strategy, slow in (("auto", "launch_seconds"), ("auto", "link_bytes_per_s"), ("fused", "launch_seconds")):
        comm = Communicator(dist.group.WORLD, arena_bytes=1 << 16, strategy=strategy)
        arena = comm.device_arena
        assert arena is not None and arena.rates is not None
        arena.rates = replace(arena.rates, **{slow: 1.0})
        # Whole numbers, so that every order of adding them has the same bits.
        x, w = torch.arange(70.0).view(7, 10) + comm.rank, torch.arange(60.0).view(6, 10) - comm.rank
        want = sum((x - comm.rank + rank) @ (w + comm.rank - rank).T for rank in range(comm.size)) + torch.ones(6)
        with gathered_rows(comm) as rows:
            y = matmul_all_reduce(x, w, comm, bias=torch.ones(6))
        found.append((int(arena.epoch) > 0, rows == [comm.size * 7], torch.equal(y, want)))
    return found


@contextlib.contextmanager
def gathered_rows(comm: Communicator) -> Iterator[list[int]]:
    """List the rows of every gather that is no kernel's."""
    rows: list[int] = []
    gather = comm.all_gather_rows

    def listed(x: Tensor, num_rows: int, **options: str) -> Tensor:
        rows.append(num_rows)
        return gather(x, num_rows, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "all_gather_rows", listed)
        yield rows


@pytest.mark.skipif(triton is None, reason="kernels need triton")
def test_ways_of_an_all_reduce(interpreters: RankPool) -> None:
    """Three ranks: where launches are slow one collective is less, where links are slow two send fewer bytes."""
    for found in interpreters.run(all_reduced, 3):
        assert found == [(False, True, True), (False, False, True), (True, False, True)]
