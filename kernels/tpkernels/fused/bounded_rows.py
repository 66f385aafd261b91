"""Rows of experts moved by kernels over symmetric memory, without a wait for the host: routes, and both ways.

    routes           the counts of all ranks, in tables on the device                  kernels/counts_kernel.py
    take_rows        x[t, D] -> rows[bound, D] at the experts' owner, or weighted      kernels/rows_kernel.py
    sum_rows         h[bound, D] -> y[t, D]: the k rows of each token, added by its owner in the order of the choice

Rows lie as exchange/experts.py says, and every result has the bits of that way; what follows them is zeros. What the
host makes tensors by is fixed before: R' becomes `bound`, the same on all ranks. In the worst case, N t k, nothing can
spill. With less (a load factor times the mean, t k) rows beyond it are dropped, and counted: `spilled` must be looked
at before what was computed is used. Symmetric memory holds t D elements for the one way, t k D for the other, whatever
the routing is; if that is more than a generation of the arena, rows move in pieces of some columns each.

The decision a reader will question: the worst case is allocated, N times what comes on average, in every tensor of a
rank's experts. It is memory that nobody else could use: routing may need it in the next step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.device_arena import DeviceArena
from tpkernels.exchange.experts import Routes, columns_of_piece, nearest_divisor
from tpkernels.fused.gather import begin_call, poison_if_left, raise_where_it_is_known
from tpkernels.fused.kernels.counts_kernel import MOST_EXPERTS, launch_counts, slots_bytes
from tpkernels.fused.kernels.rows_kernel import launch_return, launch_take, returned
from tpkernels.ops.experts.rows import combine_forward, take_backward
from tpkernels.ops.matmul.kernel import KERNEL_DTYPES
from tpkernels.symmetric.memory import ALIGNMENT_BYTES

_MOST_ROWS = 2**31 - 1


@dataclass(frozen=True)
class BoundedRoutes(Routes):
    """Routes of which the host knows sizes alone.

    Attributes:
        order, places, weights: as Routes has them.
        offsets: int32 [E/N + 1], on the device: rows offsets[i] to offsets[i + 1] are those of this rank's expert i, as
            far as they fit.
        counts: int32 [N, E], on the device.
        num_rows: how many rows fit at an owner; the same on all ranks.
        segments: int32 [3, E, N], on the device, as counts_kernel.py has them.
        spilled: int32 [N], on the device: rows of each owner's experts that do not fit; the same on all ranks.
        most_tokens: no rank has more; the same on all ranks.
    """

    segments: Tensor
    spilled: Tensor
    most_tokens: int


def can_bound(comm: Communicator, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kernels move rows of a dtype between the ranks of a communicator; the same on all ranks.

    Args:
        device: of the rows; without an index that of the arena.
    """
    arena = comm.device_arena
    if arena is None or dtype not in KERNEL_DTYPES:
        return False
    return arena.device.type == device.type and device.index in (None, arena.device.index)


@torch.no_grad()
def exchange_bounded_counts(
    order: Tensor,
    places: Tensor,
    weights: Tensor,
    counts: Tensor,
    comm: Communicator,
    most_tokens: int,
    rows_bound: int | None = None,
) -> BoundedRoutes:
    """Tell all ranks how many rows each expert gets from this one; the host waits for nothing.

    Collective, once for each layer and micro-batch.

    Args:
        order, places, weights, counts: as exchange_counts. That counts add up to the rows nobody sees.
        comm: the N ranks that share the experts, with an arena for kernels where these tensors lie.
        most_tokens: no rank has more tokens; the same on all ranks.
        rows_bound: how many rows fit at an owner, the same on all ranks; default N * most_tokens * k, the worst case.

    Raises:
        ValueError: N does not divide E, or E is above 512; shapes that do not fit, more tokens than that, a negative
            bound; an arena that is too small for N E numbers.
        CallMismatch, PeerError: as DeviceArena.begin; also for ranks that differ in what must be the same.

    Cost: one launch of one program; E numbers to each rank.
    """
    (tokens, k), num_experts = weights.shape, len(counts)
    bound = comm.size * most_tokens * k if rows_bound is None else rows_bound
    problem = ""
    if num_experts % comm.size:
        problem = (
            f"every rank owns as many experts: {num_experts} experts do not divide by {comm.size} ranks: use "
            f"{nearest_divisor(num_experts, comm.size)} ranks"
        )
    elif order.shape != (tokens * k,) or places.shape != order.shape:
        problem = (
            f"order and places have an entry for each choice: got {tuple(order.shape)} and {tuple(places.shape)} for "
            f"weights {tuple(weights.shape)}: pass those of these tokens"
        )
    elif tokens > most_tokens or not 0 <= bound <= _MOST_ROWS or comm.size * most_tokens * k > _MOST_ROWS:
        problem = (
            f"a rank has at most most_tokens tokens, all of them {_MOST_ROWS} choices, and rows_bound rows: got "
            f"{tokens} x {k} with most_tokens {most_tokens} and rows_bound {bound}: pass what all ranks' sizes allow"
        )
    elif num_experts > MOST_EXPERTS:
        problem = (
            f"kernels move rows of up to {MOST_EXPERTS} experts: got {num_experts}: pass no most_tokens to routes_of"
        )
    arena = _arena_of(comm, counts)
    if not problem and slots_bytes(num_experts, comm.size) > arena.generation_bytes:
        problem = (
            f"{num_experts} numbers of {comm.size} ranks need {slots_bytes(num_experts, comm.size)} bytes of a "
            f"generation of the arena, which has {arena.generation_bytes}: open it with more"
        )
    if problem:
        arena.refuse(problem)
    kind = f"pushes, for {k} choices of up to {most_tokens} tokens"
    with poison_if_left(arena):
        generation, call = begin_call(arena, "routes_of", kind, bound, num_experts, torch.int32, 0)
        tables = launch_counts(counts.contiguous(), bound, arena, generation, call)
    raise_where_it_is_known(arena)
    segments, offsets, spilled = tables
    counts = segments[0].t()
    return BoundedRoutes(order, places, weights, offsets, counts, bound, segments, spilled, most_tokens)


@torch.no_grad()
def take_rows(x: Tensor, routes: BoundedRoutes, comm: Communicator, *, scaled: bool = False) -> Tensor:
    """Return rows[bound, D] of this rank's experts, from the tokens of all ranks; zeros behind the last expert's.

    Args:
        x: [t, D] of one of KERNEL_DTYPES.
        scaled: multiply by the pairs' weights, in their dtype.
    """
    arena = _arena_of(comm, x)
    x = x if x.stride(1) == 1 else x.contiguous()
    columns, k, most = x.shape[1], routes.num_choices, routes.most_tokens
    rows = x.new_empty(routes.num_rows, columns)
    weights = routes.weights.contiguous() if scaled else None
    # A rank's part of a generation: columns of its tokens' rows, the pairs of its sorted rows, the pairs' weights.
    order_bytes = _aligned(4 * most * k)
    weights_bytes = 0 if weights is None else _aligned(weights.element_size() * most * k)
    width = columns_of_piece(
        arena, order_bytes + weights_bytes + ALIGNMENT_BYTES, most * x.element_size(), columns, "dispatch"
    )
    with poison_if_left(arena):
        for first in range(0, columns, width):
            some = slice(first, min(first + width, columns))
            generation, call = begin_call(arena, "dispatch", "pulls", routes.num_rows, columns, x.dtype, first)
            order_at = _aligned(most * (some.stop - some.start) * x.element_size())
            launch_take(
                rows[:, some],
                x[:, some],
                routes.order,
                weights,
                routes.segments,
                routes.offsets,
                arena,
                k,
                order_at,
                order_at + order_bytes,
                generation,
                call,
            )
    raise_where_it_is_known(arena)
    return rows


@torch.no_grad()
def sum_rows(
    h: Tensor, routes: BoundedRoutes, comm: Communicator, *, weighted: bool, keeps: bool
) -> tuple[Tensor, Tensor | None]:
    """Return y[t, D], each token's k rows added in the order of its choice, and these rows if they are to be kept.

    Args:
        h: [bound, D], what this rank's experts made; rows behind the last expert's are not read.
        weighted: multiply by the weights before they are added.
        keeps: whether to return ys[R, D], sorted as `order` is, too. A row that did not fit is zeros.
    """
    arena = _arena_of(comm, h)
    h = h if h.stride(1) == 1 else h.contiguous()
    columns, num_sorted = h.shape[1], len(routes.order)
    most_bytes = routes.most_tokens * routes.num_choices * h.element_size()
    width = columns_of_piece(arena, 0, most_bytes, columns, "combine")
    is_whole = width == columns
    ys = None if is_whole else h.new_empty(num_sorted, columns)
    with poison_if_left(arena):
        for first in range(0, columns, width):
            some = slice(first, min(first + width, columns))
            generation, call = begin_call(arena, "combine", "pushes", routes.num_rows, columns, h.dtype, first)
            piece = h[:, some]
            launch_return(piece, num_sorted, routes.segments, routes.offsets, routes.spilled, arena, generation, call)
            came = returned(arena, generation, num_sorted, piece.shape[1], h.dtype)
            if ys is not None:
                ys[:, some] = came
    raise_where_it_is_known(arena)
    # Where all columns came at once they are read where they came, before this rank begins another call.
    rows = came if ys is None else ys
    if weighted:
        y = combine_forward(rows, routes.places, routes.weights)
    else:
        y = take_backward(rows, routes.places, routes.num_choices)
    return y, (rows.clone() if is_whole else rows) if keeps else None


def _arena_of(comm: Communicator, x: Tensor) -> DeviceArena:
    arena = comm.device_arena
    if arena is None or arena.device != x.device:
        raise ValueError(
            f"rows that kernels move need an arena of kernels on {x.device}, and group {comm.name} has none there: "
            "open its communicator with arena_bytes and that device, or pass no most_tokens to routes_of"
        )
    return arena


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
