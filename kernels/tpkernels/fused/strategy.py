"""How a sharded matmul and its exchange are done: one after the other, fused, or pushed.

    plain   a collective of the process group, and the fastest matmul there is
    fused   gather: copy engines fetch while the matmul computes; scatter: tiles are sent as they are computed
    push    gather only: the matmul's first programs store the shard into the peers' memory; for few tokens

The ranks of a group must choose alike, or they wait for each other in vain. So the choice is a function of sizes that
all ranks share and of one table of rates (work.py), and does not depend on any measurement. With it goes how the rows
move, in which pieces and under how many flags: one `Decision` per call, made once per shape, dtype and group.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tpkernels.exchange.arena import exchange_bytes
from tpkernels.exchange.device_arena import DeviceArena, shard_pieces
from tpkernels.exchange.strategies import Strategy
from tpkernels.fused.configs import exchange_config
from tpkernels.launch import Target, cdiv, target_of
from tpkernels.symmetric.signals_kernel import MAX_SPLITS
from tpkernels.work import (
    Rates,
    Work,
    all_gather_work,
    fused_gather_seconds,
    fused_scatter_seconds,
    matmul_work,
    plain_seconds,
    push_gather_seconds,
    reduce_scatter_work,
)

Operation = Literal["gather", "scatter"]
# Matrix units compute at least 64 rows, also for a shard with fewer.
_LEAST_ROWS = 64


class Decision(NamedTuple):
    """How kernels do a call.

    Attributes:
        pushes: whether a gather stores into the peers' memory, instead of fetching from it.
        pieces: (first row, rows) of every shard, as it moves: a call of its own each.
        split_rows: to gather: rows under one flag.
        by_engine: whether what a gather fetches is fetched by copy engines, instead of a kernel.
    """

    pushes: bool
    pieces: tuple[tuple[int, int], ...]
    split_rows: int
    by_engine: bool


class _Room(NamedTuple):
    """What an arena has for a call; the same on all its ranks."""

    world: int
    slot_bytes: int
    generation_bytes: int
    split_bytes: int
    engine_bytes: int
    rates: Rates | None


def decide(
    arena: DeviceArena,
    strategy: str,
    operation: Operation,
    x: Tensor,
    num_tokens: int,
    widths: Sequence[int],
    inner: int,
) -> Decision | None:
    """Decide whether kernels do a call, and how; all ranks decide alike, by sizes that they share.

    Args:
        arena: whose kernels.
        strategy: the group's: "auto" chooses by sizes.
        operation: as `choose`.
        x: an operand, for its dtype and device.
        num_tokens: T, of all ranks.
        widths: columns of each matrix; F/tp too must be equal on all ranks for "auto".
        inner: what is summed over in the products.

    Returns:
        None: a collective, before or after the product.

    Raises:
        ValueError: a row does not fit into the arena; on every rank.
    """
    split_bytes, engine_bytes = arena.split_bytes, arena.engine_bytes
    room = _Room(arena.world, arena.slot_bytes, arena.generation_bytes, split_bytes, engine_bytes, arena.rates)
    return decided(strategy, operation, num_tokens, tuple(widths), inner, x.dtype, target_of(x), room)


# The same few sizes come in every layer.
@functools.lru_cache(maxsize=1024)
def decided(
    strategy: str,
    operation: Operation,
    num_tokens: int,
    widths: tuple[int, ...],
    inner: int,
    dtype: torch.dtype,
    target: Target,
    room: _Room,
) -> Decision | None:
    """Return `decide`'s answer for these sizes, made once for each."""
    row_bytes = (inner if operation == "gather" else sum(widths)) * dtype.itemsize
    fits = row_bytes <= room.slot_bytes
    if strategy == "auto":
        if room.rates is None or not fits:
            return None
        strategy = choose(operation, num_tokens, sum(widths), inner, room.world, dtype.itemsize, room.rates)
    if strategy == "plain":
        return None
    if not fits:
        raise ValueError(
            f"a row must fit into the arena: rows of {row_bytes} bytes, room for {room.slot_bytes}: open it with "
            f"{exchange_bytes(room.world, row_bytes, room.world)} bytes"
        )
    pushes = strategy == "push" and operation == "gather"
    room_bytes = room.slot_bytes if pushes or operation == "scatter" else room.generation_bytes
    pieces = shard_pieces(num_tokens, room.world, rows_that_fit(room_bytes, row_bytes))
    most = cdiv(num_tokens, room.world)
    by_engine = is_for_engines(most * row_bytes, room.engine_bytes)
    # A copy engine wants large splits; programs want many, to share.
    enough = cdiv(room.split_bytes, max(row_bytes, 1)) if by_engine and not pushes else 1
    tiles = [exchange_config(most, columns, room.world, dtype, target).block_m for columns in widths]
    tile = max(tiles, default=1)
    # Whole tiles, no more splits than there are flags.
    split_rows = tile * max(cdiv(enough, tile), cdiv(most, tile * MAX_SPLITS), 1)
    return Decision(pushes, tuple(pieces), split_rows, by_engine)


def is_for_engines(shard_bytes: int, engine_bytes: int) -> bool:
    """Return whether copy engines fetch shards of this size; see DeviceArena.engine_bytes."""
    return shard_bytes >= engine_bytes


def rows_that_fit(room_bytes: int, row_bytes: int) -> int:
    """Return how many rows fit into the room; `decide` has already checked that one row does."""
    rows = room_bytes // max(row_bytes, 1)
    assert rows, "decide comes first"
    return rows


def choose(
    operation: Operation, rows: int, columns: int, inner: int, world: int, item_bytes: int, rates: Rates
) -> Strategy:
    """Return the strategy that is predicted to take the least time; with equal times the plainer one.

    Args:
        operation: "gather", y[T, F] = all_gather(x[T/tp, D]) @ w.T, or "scatter",
            y[T/tp, D] = reduce_scatter(x[T, F] @ w.T).
        rows: T, of all ranks.
        columns, inner: of the matmul that each rank computes: F and D to gather, D and F to scatter, where F is one
            rank's share; for several weights their sum.
        world: tp.
        item_bytes: per element.
        rates: the same on every rank: if a group's GPUs differ, those of its first rank.

    Returns:
        "plain" for a single rank, which has nothing to exchange; "push" only to gather.

    Numerics: rates are those of bfloat16. Matmuls of wider elements take longer than predicted, and then all strategies
    take nearly the same time.
    """
    return min(predicted(operation, rows, columns, inner, world, item_bytes, rates).items(), key=_seconds)[0]


def predicted(
    operation: Operation, rows: int, columns: int, inner: int, world: int, item_bytes: int, rates: Rates
) -> dict[Strategy, float]:
    """Return the predicted seconds of each possible strategy, the plainer first; arguments as for `choose`.

    For small shards the prediction is too good for fused: for (rows, columns, inner) of (4096, 1792, 4096) on 8 H100s
    it is 1.29 times as fast as plain, while 1.08 was published; for (16384, 3584, 8192) 1.34, published 1.38.
    """
    whole = _matmul(rows, columns, inner, item_bytes)
    if world == 1:
        return {"plain": plain_seconds(whole, Work(), 1, rates)}
    shard_rows = -(-rows // world)
    by_shards = _matmul(rows, columns, inner, item_bytes, num_parts=world)
    if operation == "scatter":
        scatter = reduce_scatter_work(world * shard_rows * columns * item_bytes, world)
        return {
            "plain": plain_seconds(whole, scatter, world, rates),
            "fused": fused_scatter_seconds(by_shards, scatter, world, rates),
        }
    gather = all_gather_work(shard_rows * inner * item_bytes, world)
    splits = splits_of(rows, columns, inner, world, item_bytes, rates)
    return {
        "plain": plain_seconds(whole, gather, world, rates),
        "push": push_gather_seconds(by_shards, gather, rates),
        "fused": fused_gather_seconds(by_shards, gather, world, splits, rates),
    }


def splits_of(rows: int, columns: int, inner: int, world: int, item_bytes: int, rates: Rates) -> int:
    """Return into how many splits a fused gather cuts a shard, each with its own flag: 1, 2, 4 or 8.

    With few splits the matmul waits for the first one; each split costs a copy, so shards of few rows are not cut.
    Arguments as for `choose`; with equal times the fewest splits.
    """
    if world == 1:
        return 1
    shard_rows = -(-rows // world)
    gather = all_gather_work(shard_rows * inner * item_bytes, world)
    matmul = _matmul(rows, columns, inner, item_bytes, num_parts=world)
    counts = (1, 2, 4, MAX_SPLITS)
    times = {num_splits: fused_gather_seconds(matmul, gather, world, num_splits, rates) for num_splits in counts}
    return min(times.items(), key=_seconds)[0]


def _matmul(rows: int, columns: int, inner: int, item_bytes: int, *, num_parts: int = 1) -> Work:
    """Return the work of a matmul whose rows are computed in `num_parts` parts, each of whole tiles."""
    part_rows = -(-rows // num_parts)
    computed = num_parts * -(-part_rows // _LEAST_ROWS) * _LEAST_ROWS
    exact = matmul_work(rows, columns, inner, item_bytes)
    return Work(flops=matmul_work(computed, columns, inner, item_bytes).flops, memory_bytes=exact.memory_bytes)


def _seconds(timed: tuple[object, float]) -> float:
    return timed[1]
