"""How a sharded matmul and its exchange are done: one after the other, fused, or pushed.

    plain   a collective of the process group, and the fastest matmul there is
    fused   gather: copy engines fetch while the matmul computes; scatter: tiles are sent as they are computed
    push    gather only: the matmul's first programs store the shard into the peers' memory; for few tokens

The ranks of a group must choose alike, or they wait for each other in vain. So the choice is a function of sizes that
all ranks share and of one table of rates (work.py), and does not depend on any measurement. With it goes how the rows
move, in which pieces and under how many flags: one `Decision` per call, made once per shape, dtype and group. What is
predicted (prediction.py) is the decision that would be carried out.

The decision a reader will question: fewer than 2,048 tokens are plain, whatever is predicted, unless the call is
captured into a CUDA graph. Everybody who has measured found the break-even there, and nothing here has been measured.
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
from tpkernels.fused.configs import busiest_multiply_adds, exchange_config
from tpkernels.fused.prediction import (
    fused_all_reduce_host_seconds,
    fused_all_reduce_seconds,
    fused_scatter_seconds,
    one_shot_host_seconds,
    one_shot_seconds,
    plain_host_seconds,
    plain_seconds,
    product_seconds,
    pull_gather_seconds,
    pull_host_seconds,
    push_gather_seconds,
    push_host_seconds,
    scatter_host_seconds,
    slower,
    two_collectives_host_seconds,
    two_collectives_seconds,
)
from tpkernels.launch import Target, cdiv, processors_of, target_of
from tpkernels.symmetric.signals_kernel import MAX_SPLITS
from tpkernels.work import Rates, Work, all_gather_work, matmul_work, reduce_scatter_work

Operation = Literal["gather", "scatter"]
AllReduce = Literal["kernels", "two_collectives", "one_shot"]
# Triton-distributed, Flux and torch's async TP gain little or lose below; see the head of this file.
_FEWEST_TOKENS = 2048
# Larger than every shard.
_NO_ENGINES = 1 << 62


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
    reserved: int = 0


class _Call(NamedTuple):
    """Sizes of a matmul with its exchange, which all ranks share; as `decide`'s arguments.

    Attributes:
        in_graph: whether the call is captured into a CUDA graph.
    """

    operation: Operation
    num_tokens: int
    widths: tuple[int, ...]
    inner: int
    dtype: torch.dtype
    target: Target
    in_graph: bool

    @property
    def moved_row_bytes(self) -> int:
        """Return the bytes of a row that is exchanged."""
        return (self.inner if self.operation == "gather" else sum(self.widths)) * self.dtype.itemsize


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
        operation: "gather", y[T, F] = all_gather(x[T/tp, D]) @ w.T, or "scatter",
            y[T/tp, D] = reduce_scatter(x[T, F] @ w.T).
        x: an operand, for its dtype and device.
        num_tokens: T, of all ranks.
        widths: columns of each matrix; F/tp too must be equal on all ranks for "auto".
        inner: what is summed over in the products.

    Returns:
        None: a collective, before or after the product.

    Raises:
        ValueError: a row does not fit into the arena; on every rank.
    """
    return decided(strategy, _call(operation, x, num_tokens, widths, inner), _room(arena))


# The same few sizes come in every layer.
@functools.lru_cache(maxsize=1024)
def decided(strategy: str, call: _Call, room: _Room) -> Decision | None:
    """Return `decide`'s answer for these sizes, made once for each."""
    fits = call.moved_row_bytes <= room.slot_bytes
    if strategy == "auto":
        if room.rates is None or not fits or not is_worth_predicting(call.num_tokens, in_graph=call.in_graph):
            return None
        times = predicted(call, room)
        strategy = min(times, key=lambda name: times[name])
        if strategy == "fused" and call.operation == "gather":
            return _pulled(call, room)[1]
    if strategy == "plain":
        return None
    if not fits:
        raise ValueError(
            f"a row must fit into the arena: rows of {call.moved_row_bytes} bytes, room for {room.slot_bytes}: open it "
            f"with {exchange_bytes(room.world, call.moved_row_bytes, room.world)} bytes"
        )
    return _executed(strategy, call, room)


def decide_all_reduce(arena: DeviceArena, strategy: str, x: Tensor, columns: int, inner: int) -> AllReduce:
    """Decide how a matmul whose result all ranks need is done, the exchange as a whole; all ranks decide alike.

    Args:
        arena, strategy: as `decide`.
        x: all tokens, [T, inner].
        columns, inner: of the matmul.

    Returns:
        "kernels": `decide` has a decision for the scatter, and its sums are gathered. "two_collectives": a
        reduce-scatter and an all-gather. "one_shot": each rank gets every rank's result and adds them up itself.
    """
    return decided_all_reduce(strategy, _call("scatter", x, len(x), [columns], inner), _room(arena))


@functools.lru_cache(maxsize=1024)
def decided_all_reduce(strategy: str, call: _Call, room: _Room) -> AllReduce:
    """Return `decide_all_reduce`'s answer for these sizes, made once for each."""
    if strategy not in ("auto", "plain"):
        return "kernels"
    if room.rates is None:
        return "two_collectives"
    times = predicted_all_reduce(call, room)
    may_fuse = is_worth_predicting(call.num_tokens, in_graph=call.in_graph) and call.moved_row_bytes <= room.slot_bytes
    if strategy == "plain" or not may_fuse:
        del times["kernels"]
    return min(times, key=lambda name: times[name])


def is_worth_predicting(num_tokens: int, *, in_graph: bool) -> bool:
    """Return whether a call may be fused at all: see the head of this file."""
    return in_graph or num_tokens >= _FEWEST_TOKENS


def predicted(call: _Call, room: _Room) -> dict[Strategy, float]:
    """Return the predicted seconds of each possible strategy, the plainer first; of equal times the first counts.

    Numerics: rates are those of bfloat16. Matmuls of wider elements take longer than predicted, and then all strategies
    take nearly the same time.
    """
    rates, world = room.rates, room.world
    assert rates is not None, "auto takes collectives"
    matmul, exchange = _works(call, world)
    times: dict[Strategy, float] = {
        "plain": slower(plain_seconds(matmul, exchange, world, rates), plain_host_seconds(), in_graph=call.in_graph)
    }
    if world == 1:
        return times
    if call.operation == "scatter":
        product = _product(call, room, matmul, rates, beside_copies=False)
        scattered = fused_scatter_seconds(product, exchange, world, rates)
        times["fused"] = slower(scattered, scatter_host_seconds(), in_graph=call.in_graph)
        return times
    product = _product(call, room, matmul, rates, beside_copies=True)
    pushed = _executed("push", call, room)
    seconds = push_gather_seconds(product, exchange, world, _num_splits(pushed), rates)
    host_seconds = len(pushed.pieces) * push_host_seconds(len(call.widths))
    times["push"] = slower(seconds, host_seconds, in_graph=call.in_graph)
    times["fused"] = _pulled(call, room)[0]
    return times


def _pulled(call: _Call, room: _Room) -> tuple[float, Decision]:
    """Return the predicted seconds of a gather that is pulled, and how: by engines, or by a kernel if that is faster.

    Engines need no processors, but the host's time for every peer.
    """
    rates, world = room.rates, room.world
    assert rates is not None, "auto takes collectives"
    matmul, gather = _works(call, world)
    product = _product(call, room, matmul, rates, beside_copies=True)
    ways = []
    for by_engine in (True, False):
        how = _executed("fused", call, room._replace(engine_bytes=0 if by_engine else _NO_ENGINES))
        seconds = pull_gather_seconds(product, gather, world, _num_splits(how), rates, by_engine=by_engine)
        host_seconds = len(how.pieces) * pull_host_seconds(
            world, len(call.widths), by_engine=by_engine, waits_apart=room.reserved > 0
        )
        ways.append((slower(seconds, host_seconds, in_graph=call.in_graph), how))
    return min(ways, key=lambda way: way[0])


def predicted_all_reduce(call: _Call, room: _Room) -> dict[AllReduce, float]:
    """Return the predicted seconds of each way to do a matmul whose sums all ranks need; as `predicted`."""
    rates, world = room.rates, room.world
    assert rates is not None, "auto takes collectives"
    matmul, scatter = _works(call, world)
    shard_bytes = cdiv(call.num_tokens, world) * call.moved_row_bytes
    gather = all_gather_work(shard_bytes, world)
    by_two = two_collectives_seconds(matmul, scatter, gather, world, rates)
    at_once = one_shot_seconds(matmul, world * shard_bytes, world, rates)
    times: dict[AllReduce, float] = {
        "two_collectives": slower(by_two, two_collectives_host_seconds(), in_graph=call.in_graph),
        "one_shot": slower(at_once, one_shot_host_seconds(), in_graph=call.in_graph),
    }
    product = _product(call, room, matmul, rates, beside_copies=False)
    scattered = fused_scatter_seconds(product, scatter, world, rates)
    fused = fused_all_reduce_seconds(scattered, gather, world, rates)
    times["kernels"] = slower(fused, fused_all_reduce_host_seconds(), in_graph=call.in_graph)
    return times


def _call(operation: Operation, x: Tensor, num_tokens: int, widths: Sequence[int], inner: int) -> _Call:
    in_graph = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return _Call(operation, num_tokens, tuple(widths), inner, x.dtype, target_of(x), in_graph)


def _room(arena: DeviceArena) -> _Room:
    split_bytes, engine_bytes = arena.split_bytes, arena.engine_bytes
    return _Room(
        arena.world,
        arena.slot_bytes,
        arena.generation_bytes,
        split_bytes,
        engine_bytes,
        arena.rates,
        arena.reserved_processors,
    )


def _executed(strategy: str, call: _Call, room: _Room) -> Decision:
    """Return how a call is carried out by kernels."""
    row_bytes = call.moved_row_bytes
    pushes = strategy == "push" and call.operation == "gather"
    room_bytes = room.slot_bytes if pushes or call.operation == "scatter" else room.generation_bytes
    pieces = shard_pieces(call.num_tokens, room.world, rows_that_fit(room_bytes, row_bytes))
    most = cdiv(call.num_tokens, room.world)
    by_engine = is_for_engines(most * row_bytes, room.engine_bytes)
    # A copy engine wants large splits; programs want many, to share.
    enough = cdiv(room.split_bytes, max(row_bytes, 1)) if by_engine and not pushes else 1
    tiles = [
        exchange_config(
            most, columns, call.inner, room.world, call.dtype, call.target, reserved=room.reserved, beside_copies=True
        ).block_m
        for columns in call.widths
    ]
    tile = max(tiles, default=1)
    # Whole tiles, no more splits than there are flags.
    split_rows = tile * max(cdiv(enough, tile), cdiv(most, tile * MAX_SPLITS), 1)
    return Decision(pushes, tuple(pieces), split_rows, by_engine)


def _num_splits(decision: Decision) -> int:
    """Return how many splits a shard has."""
    return sum(max(cdiv(rows, decision.split_rows), 1) for _, rows in decision.pieces)


def _works(call: _Call, world: int) -> tuple[Work, Work]:
    """Return the work of the matmul of all ranks' rows, and of the exchange."""
    matmul = matmul_work(call.num_tokens, sum(call.widths), call.inner, call.dtype.itemsize)
    shard_bytes = cdiv(call.num_tokens, world) * call.moved_row_bytes
    if call.operation == "gather":
        return matmul, all_gather_work(shard_bytes, world)
    return matmul, reduce_scatter_work(world * shard_bytes, world)


def _product(call: _Call, room: _Room, matmul: Work, rates: Rates, *, beside_copies: bool) -> float:
    """Return the time of the fused matmul, one product after the other."""
    most = cdiv(call.num_tokens, room.world)
    busiest = sum(
        busiest_multiply_adds(
            most,
            columns,
            call.inner,
            room.world,
            call.dtype,
            call.target,
            reserved=room.reserved,
            beside_copies=beside_copies,
        )
        for columns in call.widths
    )
    return product_seconds(busiest, matmul, processors_of(call.target), rates)


def is_for_engines(shard_bytes: int, engine_bytes: int) -> bool:
    """Return whether copy engines fetch shards of this size; see DeviceArena.engine_bytes."""
    return shard_bytes >= engine_bytes


def rows_that_fit(room_bytes: int, row_bytes: int) -> int:
    """Return how many rows fit into the room; `decide` has already checked that one row does."""
    rows = room_bytes // max(row_bytes, 1)
    assert rows, "decide comes first"
    return rows
