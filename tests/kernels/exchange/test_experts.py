"""Rung: gloo ranks, fake ranks. Rows to experts and back, over hostile arenas and by all-to-all, against one process.

Every rank draws the inputs of all ranks. What nobody has written is NaN: torch's empty tensors, and the arena.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.arena_ranks import hostile_communicator
from support.ranks.fake_ranks import fake_rank
from support.ranks.rank_pool import RankPool
from support.ranks.standstill import Standstill
from torch import Tensor
from tpkernels.exchange.arena import CallMismatch
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.experts import Routes, combine_gradients, exchange_counts, rows_to_experts, rows_to_tokens
from tpkernels.fused.experts import combine, combine_reference, dispatch, dispatch_reference, routes_of
from tpkernels.ops.experts.route import Routing
from tpkernels.symmetric.signals import GroupPoisoned, PeerTimeout

PAGE = 1 << 12
KINDS = ("uniform", "zipf", "one", "every other", "last rank", "nothing")


@dataclass
class Drawn:
    """One rank's tokens, their routing, what its experts multiply by, and the gradient of y."""

    x: Tensor
    experts: Tensor
    weights: Tensor
    matrices: Tensor  # [E, D, D], the same on all ranks
    dy: Tensor


def drawn(kind: str, rank: int, tokens: int, num_experts: int, choices: int, columns: int, dtype: torch.dtype) -> Drawn:
    generator = torch.Generator().manual_seed(hash((KINDS.index(kind), rank, tokens, choices)) % 2**31)

    def draw(*shape: int, at: torch.Generator = generator) -> Tensor:
        return torch.randn(shape, generator=at, dtype=torch.float64).to(dtype)

    likely = torch.ones(num_experts)
    if kind == "zipf":
        likely = 1.0 / torch.arange(1, num_experts + 1) ** 2
    elif kind == "one":
        likely = torch.full((num_experts,), 1e-30)
        likely[0] = 1
    elif kind == "every other":
        likely[1::2] = 0
    elif kind == "last rank":
        likely[: num_experts - choices] = 0
    count = 0 if kind == "nothing" else tokens
    rows = [torch.multinomial(likely, choices, generator=generator) for _ in range(count)]
    experts = torch.stack(rows).int() if rows else torch.empty(0, choices, dtype=torch.int32)
    wide = torch.promote_types(dtype, torch.float32)
    shared = draw(num_experts, columns, columns, at=torch.Generator().manual_seed(5))
    return Drawn(draw(count, columns), experts, draw(count, choices).to(wide), shared, draw(count, columns))


def routes(mine: Drawn, comm: Communicator, weights: Tensor | None = None) -> Routes:
    counts = torch.bincount(mine.experts.flatten(), minlength=len(mine.matrices)).int()
    weights = mine.weights if weights is None else weights
    return routes_of(Routing(mine.experts, weights, counts, torch.empty(0)), comm)


@contextlib.contextmanager
def empty_is_nan() -> Iterator[None]:
    """Fill what torch.empty returns."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def results(mine: Drawn, comm: Communicator) -> list[Tensor]:
    """This rank's rows and y; the gradients of x, weights and matrices."""
    x, weights, matrices = (leaf.detach().requires_grad_() for leaf in (mine.x, mine.weights, mine.matrices))
    with empty_is_nan():
        found = routes(mine, comm, weights)
        rows = dispatch(x, found, comm)
        own = comm.rank * len(matrices) // comm.size
        parts = [
            rows[begin:end] @ matrices[own + i] for i, (begin, end) in enumerate(itertools.pairwise(found.offsets))
        ]
        assert int(found.offsets[-1]) == len(rows) == found.num_rows
        y = combine(torch.cat(parts), found, comm)
        return [rows.detach(), y.detach(), *torch.autograd.grad(y, (x, weights, matrices), mine.dy)]


def expected(everyone: list[Drawn], rank: int) -> list[Tensor]:
    """What one process finds: the specifications, differentiated by autograd."""
    matrices = everyone[0].matrices.detach().requires_grad_()
    leaves = [[d.x.detach().requires_grad_(), d.weights.detach().requires_grad_()] for d in everyone]
    ys = [
        combine_reference(torch.stack([x @ m for m in matrices]), d.experts, weights)
        for d, (x, weights) in zip(everyone, leaves, strict=True)
    ]
    grads = torch.autograd.grad(ys, [*leaves[rank], matrices], [d.dy for d in everyone], allow_unused=True)
    per = len(matrices) // len(everyone)
    owned = range(rank * per, (rank + 1) * per)
    rows = dispatch_reference([d.x for d in everyone], [d.experts for d in everyone], owned)
    dmatrices = torch.zeros_like(matrices)
    dmatrices[owned.start : owned.stop] = grads[2][owned.start : owned.stop]
    return [rows, ys[rank].detach(), grads[0], grads[1], dmatrices]


def check_against_one_process(arena_bytes: int, tokens: list[int], num_experts: int, choices: int) -> None:
    comm = hostile_communicator(dist.group.WORLD, arena_bytes)
    columns = 130 if arena_bytes == PAGE else 5
    for kind in KINDS:
        everyone = [drawn(kind, r, t, num_experts, choices, columns, torch.float64) for r, t in enumerate(tokens)]
        got, want = results(everyone[comm.rank], comm), expected(everyone, comm.rank)
        assert torch.equal(got[0], want[0]), kind
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape and torch.allclose(a, b, rtol=1e-12, atol=1e-11), kind


@pytest.mark.parametrize("arena_bytes", [0, 1 << 16, PAGE], ids=["all-to-all", "memory", "pieces"])
@pytest.mark.parametrize(
    ("tokens", "num_experts", "choices"), [([5, 7], 6, 3), ([6, 0, 9, 1], 8, 2), ([4], 3, 2)], ids=["2", "4", "1"]
)
def test_there_and_back_as_on_one_process(
    ranks: RankPool, arena_bytes: int, tokens: list[int], num_experts: int, choices: int
) -> None:
    ranks.run(check_against_one_process, len(tokens), arena_bytes, tokens, num_experts, choices)


def outcomes(arena_bytes: int, seed: int, columns: int) -> list[bytes]:
    """The bits of all results of some micro-batches in a row."""
    comm = hostile_communicator(dist.group.WORLD, arena_bytes, seed)
    tokens, found = [9, 0, 7, 4], []
    for kind in KINDS[:3]:
        for dtype in (torch.float32, torch.bfloat16):
            mine = drawn(kind, comm.rank, tokens[comm.rank], 8, 3, columns, dtype)
            found += [t.view(torch.uint8).numpy().tobytes() for t in results(mine, comm) if t.numel()]
    return found


def test_equal_bits_whoever_is_late_and_whichever_way(ranks: RankPool) -> None:
    """Over all-to-all, over memory with other delays each time, and in pieces."""
    ways = [(0, 0), (1 << 18, 1), (1 << 18, 2), (2 * PAGE, 3)]
    found = [ranks.run(outcomes, 4, arena_bytes, seed, 100) for arena_bytes, seed in ways]
    assert found[0][0] and all(other == found[0] for other in found[1:])


def check_pieces() -> None:
    """As many calls as a generation needs for all columns, with every token at one expert too."""
    comm = hostile_communicator(dist.group.WORLD, 2 * PAGE)
    assert comm.arena is not None
    columns, tokens, choices = 300, 8, 2
    for kind, num_returned in (("uniform", None), ("last rank", comm.size * tokens * choices - tokens * choices)):
        mine = drawn(kind, comm.rank, tokens, 4, choices, columns, torch.float32)
        found = routes(mine, comm)
        before = comm.arena.epoch
        rows = dispatch(mine.x, found, comm)
        taken = comm.arena.epoch - before
        # 16 pairs take a cache line, and 8 rows of 4 bytes 126 columns: 64 of them are whole lines.
        assert taken == -(-columns // 64)
        combine(rows, found, comm)
        if num_returned is not None:
            width = comm.arena.generation_bytes // (4 * num_returned) // 64 * 64
            assert comm.arena.epoch - before - taken == -(-columns // width)


def test_what_is_too_large_moves_in_pieces(ranks: RankPool) -> None:
    ranks.run(check_pieces, 2)


def check_refusals() -> None:
    comm = hostile_communicator(dist.group.WORLD, 1 << 14)
    assert comm.arena is not None
    mine = drawn("uniform", comm.rank, 4, 4, 2, 6, torch.float32)
    late = comm.size - 1

    def counted(counts: list[int], num_rows: int = 8, choices: int = 2) -> None:
        order = torch.zeros(num_rows, dtype=torch.int32)
        exchange_counts(order, order, torch.ones(4, choices), torch.tensor(counts), comm)

    with pytest.raises(ValueError, match="3 experts do not divide by 2 ranks: use 1 ranks"):
        counted([3, 3, 2])
    # Of one rank alone: it says what is wrong, and the others that they made another call.
    with pytest.raises(
        ValueError if comm.rank == late else CallMismatch, match=r"order and places|something it refused"
    ):
        counted([2] * 4, 7 if comm.rank == late else 8)
    # What only shows in the numbers of all: all say the same.
    with pytest.raises(ValueError, match="rank 1 has 4 x 2, and counts of 9: pass what `route` returned"):
        counted([2, 2, 2, 3 if comm.rank == late else 2])
    with pytest.raises(ValueError, match=r"got \[1, 2\] by rank: use one k on all ranks"):
        counted([1 + comm.rank] * 4, 4 * (1 + comm.rank), 1 + comm.rank)
    found = routes(mine, comm)
    with pytest.raises(ValueError if comm.rank == late else CallMismatch, match=r"4 rows of floating|it refused"):
        dispatch(mine.x[: 3 if comm.rank == late else 4], found, comm)
    with pytest.raises(CallMismatch, match=r"dispatch of 16 x . float32 from column 0, which takes rows to experts"):
        dispatch(mine.x[:, : 3 + comm.rank].contiguous(), found, comm)
    with pytest.raises(CallMismatch, match=r"combine of 16 x 6 float.. from column 0, which returns rows to tokens"):
        rows = torch.zeros(found.num_rows, 6, dtype=(torch.float32, torch.float64)[comm.rank])
        combine(rows, found, comm)
    assert torch.equal(
        combine(dispatch(mine.x, found, comm), found, comm), combine(dispatch(mine.x, found, comm), found, comm)
    )
    small = hostile_communicator(dist.group.WORLD, 2 * PAGE)
    mine = drawn("uniform", comm.rank, 2000, 4, 2, 6, torch.float32)
    with pytest.raises(
        ValueError, match=r"a column of all rows must fit into the arena: dispatch has 16000 .* open it"
    ):
        dispatch(mine.x, routes(mine, small), small)


def test_what_cannot_be_exchanged_is_refused_on_all_ranks(ranks: RankPool) -> None:
    ranks.run(check_refusals, 2)


def check_a_rank_that_stays_away() -> None:
    comm = Communicator(dist.group.WORLD, arena_bytes=1 << 14, timeout_seconds=1.0)
    assert comm.arena is not None
    late = comm.size - 1
    mine = drawn("uniform", comm.rank, 4, 4, 2, 6, torch.float32)
    found = routes(mine, comm)
    rows = dispatch(mine.x, found, comm)
    for name, call in (
        ("dispatch", lambda: dispatch(mine.x, found, comm)),
        ("combine", lambda: combine(rows, found, comm)),
    ):
        standstill = Standstill(comm.arena, dist.group.WORLD)
        if comm.rank == late:
            standstill.leave()
        else:
            with (
                standstill,
                pytest.raises((PeerTimeout, GroupPoisoned), match=f"in {name}, epoch .* for rank {late}, which"),
            ):
                call()
        dist.barrier()
        with pytest.raises(GroupPoisoned, match=name):
            routes(mine, comm)
        dist.barrier()
        comm.arena.reset()


def test_a_rank_that_stays_away_is_named(ranks: RankPool) -> None:
    ranks.run(check_a_rank_that_stays_away, 2)


def shapes_and_calls(world: int) -> list[tuple[Any, ...]]:
    """What the ranks of a fake group find; all counts are then those of this rank."""
    found: list[tuple[Any, ...]] = []
    for rank in range(world):
        with fake_rank(rank, world) as recorder:
            comm = Communicator(dist.group.WORLD)
            mine = drawn("one", 0, 5, 8, 2, 6, torch.float32)
            made = routes(mine, comm)
            rows = rows_to_experts(mine.x, made, comm)
            ys = rows_to_tokens(rows, made, comm)
            dh, dweights = combine_gradients(mine.dy, ys, made, comm)
            assert dh is not None and dweights is not None
            # Gradients that nobody asks for: no row travels, and the weights' are the same.
            num_calls = len(recorder.calls)
            nothing, alone = combine_gradients(mine.dy, ys, made, comm, of_rows=False)
            assert nothing is None and alone is not None and torch.equal(alone, dweights)
            assert len(recorder.calls) == num_calls
            shapes = *rows.shape, *ys.shape, *dh.shape, *dweights.shape
            found.append((made.num_rows, shapes, [call.operation for call in recorder.calls]))
    return found


def test_over_a_group_that_is_not_gloos(ranks: RankPool) -> None:
    """One gather of counts, then an all-to-all for each of dispatch, combine and its backward."""
    (found,) = ranks.run(shapes_and_calls, 1, 4)
    mine = drawn("one", 0, 5, 8, 2, 6, torch.float32)
    for rank, (num_rows, shapes, operations) in enumerate(found):
        assert num_rows == 4 * int(((mine.experts // 2) == rank).sum())
        assert shapes == (num_rows, 6, 10, 6, num_rows, 6, 5, 2)
        assert operations == ["_allgather_base_", *["alltoall_base_"] * 3]
