"""dispatch and combine: the rows of tokens to the owners of their experts, and the experts' results back.

    rows[R', D] = dispatch(x[t, D])      row of (token, choice) = x[token], at the owner of its expert
    y[t, D]     = combine(h[R', D])      y[token] = sum over j of weights[token, j] * (row of h of (token, j))

    dispatch's backward:  dx = combine(drows) with weights of 1
    combine's backward:   dh = dispatch(dy) times the weights;  dweights[token, j] = <dy[token], row of h of (token, j)>

The token's owner adds its k terms in the order of the choice, in promote_types(dtype, float32). Where rows lie, and the
ways that they travel at their exact number, is in exchange/experts.py; how kernels move them, without a wait for the
host, in bounded_rows.py; expert_rows.py takes the one or the other, as the routes say. Here are the specification, the
registration with torch.library, and the public functions. They stand here, and not beside the exchange, because fusing
them with the grouped products keeps this contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.derivatives import differentiable_once, refuse_tangents
from tpkernels.exchange.communicator import Communicator, communicator_named
from tpkernels.exchange.experts import Routes, exchange_counts
from tpkernels.fused.bounded_rows import BoundedRoutes, exchange_bounded_counts
from tpkernels.fused.expert_rows import combine_gradients, rows_to_experts, rows_to_sums
from tpkernels.fused.ordered import exchanges
from tpkernels.ops.experts.order import sort_forward
from tpkernels.ops.experts.route import Routing
from tpkernels.ops.matmul.kernel import KERNEL_DTYPES


def dispatch_reference(shards: Sequence[Tensor], experts: Sequence[Tensor], owned: range) -> Tensor:
    """Return the rows of the experts `owned`, from all ranks' x[t, D] and experts[t, k]: the specification."""
    rows = [
        x[token]
        for expert in owned
        for x, chosen in zip(shards, experts, strict=True)
        for token, choice in (chosen == expert).nonzero().tolist()
        if choice >= 0
    ]
    return torch.stack(rows) if rows else shards[0].new_empty(0, shards[0].shape[1])


def combine_reference(results: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Return y[t, D] from every expert's result for every token of a rank, results[E, t, D]: the specification."""
    y = torch.zeros(results.shape[1:], dtype=weights.dtype)
    for choice in range(experts.shape[1]):
        chosen = results[experts[:, choice].long(), torch.arange(len(experts))]
        y = y + weights[:, choice, None] * chosen
    return y.to(results.dtype)


# The way of a routed row, as the four operators take it: schemas carry tensors, numbers and a group's name only. Routes
# of exact numbers have no `spilled`; those of a bound have their segments in place of the counts.
_WAY = (
    "Tensor order, Tensor places, Tensor weights, Tensor offsets, Tensor counts, Tensor? spilled, SymInt num_rows, "
    "SymInt most_tokens, str group"
)


def _taken_apart(routes: Routes, weights: Tensor, comm: Communicator) -> tuple[Any, ...]:
    placed = routes.order, routes.places, weights, routes.offsets
    if isinstance(routes, BoundedRoutes):
        return *placed, routes.segments, routes.spilled, routes.num_rows, routes.most_tokens, comm.name
    return *placed, routes.counts, None, routes.num_rows, 0, comm.name


def _way(
    order: Tensor,
    places: Tensor,
    weights: Tensor,
    offsets: Tensor,
    counts: Tensor,
    spilled: Tensor | None,
    num_rows: int,
    most_tokens: int,
    group: str,
) -> tuple[Routes, Communicator]:
    comm = communicator_named(group)
    if spilled is None:
        return Routes(order, places, weights, offsets, counts, num_rows), comm
    routes = BoundedRoutes(order, places, weights, offsets, counts[0].t(), num_rows, counts, spilled, most_tokens)
    return routes, comm


@torch.library.custom_op("tpkernels::dispatch", mutates_args=(), schema=f"(Tensor x, {_WAY}) -> Tensor")
def _dispatch(x: Tensor, *way: Any) -> Tensor:
    return rows_to_experts(x, *_way(*way))


@exchanges(_dispatch)
def _(x: Tensor, *way: Any) -> Tensor:
    routes, _ = _way(*way)
    return x.new_empty(routes.num_rows, x.shape[1])


@torch.library.custom_op("tpkernels::dispatch_backward", mutates_args=(), schema=f"(Tensor drows, {_WAY}) -> Tensor")
def _dispatch_backward(drows: Tensor, *way: Any) -> Tensor:
    return rows_to_sums(drows, *_way(*way), weighted=False, keeps=False)[0]


@exchanges(_dispatch_backward)
def _(drows: Tensor, *way: Any) -> Tensor:
    routes, _ = _way(*way)
    return drows.new_empty(routes.weights.shape[0], drows.shape[1])


@torch.library.custom_op("tpkernels::combine", mutates_args=(), schema=f"(Tensor h, bool keeps, {_WAY}) -> Tensor[]")
def _combine(h: Tensor, keeps: bool, *way: Any) -> list[Tensor]:
    y, ys = rows_to_sums(h, *_way(*way), weighted=True, keeps=keeps)
    # With one rank the rows at the token's owner are those of the expert's; an operator returns none of its inputs.
    return [y] if ys is None or ys is h else [y, ys]


@exchanges(_combine)
def _(h: Tensor, keeps: bool, *way: Any) -> list[Tensor]:
    routes, comm = _way(*way)
    y = h.new_empty(routes.weights.shape[0], h.shape[1])
    return [y, h.new_empty(routes.order.shape[0], h.shape[1])] if keeps and comm.size > 1 else [y]


@torch.library.custom_op(
    "tpkernels::combine_backward", mutates_args=(), schema=f"(Tensor dy, Tensor ys, {_WAY}) -> (Tensor, Tensor)"
)
def _combine_backward(dy: Tensor, ys: Tensor, *way: Any) -> tuple[Tensor, Tensor]:
    dh, dweights = combine_gradients(dy, ys, *_way(*way))
    assert dh is not None and dweights is not None, "asked for"
    return dh, dweights


@exchanges(_combine_backward)
def _(dy: Tensor, ys: Tensor, *way: Any) -> tuple[Tensor, Tensor]:
    routes, _ = _way(*way)
    return dy.new_empty(routes.num_rows, dy.shape[1]), routes.weights.new_empty(routes.weights.shape)


def _keep_for_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *tensors, ctx.num_rows, ctx.most_tokens, ctx.group = inputs
    ctx.save_for_backward(*tensors)


@differentiable_once
def _of_dispatch(ctx: Any, drows: Tensor) -> tuple[Any, ...]:
    dx = _dispatch_backward(drows, *ctx.saved_tensors, ctx.num_rows, ctx.most_tokens, ctx.group)
    return dx, *(None,) * 9


def _keep_for_combine(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    h, _, *tensors, ctx.num_rows, ctx.most_tokens, ctx.group = inputs
    ctx.save_for_backward(output[-1] if len(output) > 1 else h, *tensors)
    ctx.set_materialize_grads(False)


@differentiable_once
def _of_combine(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    dy = grads[0]
    assert dy is not None, "y has a gradient"
    dh, dweights = _combine_backward(dy, *ctx.saved_tensors, ctx.num_rows, ctx.most_tokens, ctx.group)
    return dh, None, None, None, dweights, *(None,) * 6


_dispatch.register_autograd(_of_dispatch, setup_context=_keep_for_dispatch)
_combine.register_autograd(_of_combine, setup_context=_keep_for_combine)


@torch.compiler.disable  # the host waits in here
def routes_of(
    routing: Routing, comm: Communicator, *, most_tokens: int | None = None, rows_bound: int | None = None
) -> Routes:
    """Return where the rows of all ranks' tokens go; collective, once for each layer and micro-batch.

    Args:
        routing: of this rank's tokens, as `route` returns it.
        comm: the N ranks that share the experts, E/N consecutive ones each.
        most_tokens: have kernels move the rows, over an arena for kernels (bounded_rows.can_bound); no rank has more
            tokens. None: rows move at their exact number.
        rows_bound: how many rows fit at an expert's owner, if kernels move them; default N * most_tokens * k, which
            all do. Both are the same on all ranks.

    Returns:
        Routes; with most_tokens, and more than one rank, BoundedRoutes: the rows of `dispatch` are rows_bound then,
        zeros behind routes.offsets[-1]. Rows that do not fit are left out, also from y: read routes.spilled, int32 [N],
        before results are used, and where one is not 0 compute again without most_tokens.

    Raises:
        ValueError, CallMismatch, PeerError: as exchange_counts, or exchange_bounded_counts.

    Cost: a sort (sort_by_expert), and E + 2 numbers to each rank, for which the host waits; E numbers, for which it
        does not, with most_tokens.
    """
    order, _, places = sort_forward(routing.experts, len(routing.counts))
    if most_tokens is None or comm.size == 1:
        return exchange_counts(order, places, routing.weights, routing.counts, comm)
    return exchange_bounded_counts(order, places, routing.weights, routing.counts, comm, most_tokens, rows_bound)


def dispatch(x: Tensor, routes: Routes, comm: Communicator) -> Tensor:
    """Bring the rows of this rank's tokens to the owners of the experts that they chose.

        rows[R', D] = dispatch(x[t, D]);  routes.offsets say which rows are whose
        dx[t, D] = the k rows of drows of each token, added in the order of the choice

    Args:
        x: [t, D] of float16, bfloat16, float32 or float64: this rank's tokens.
        routes: of this micro-batch (routes_of).
        comm: the ranks that share the experts. The caller keeps it alive until nothing is left to differentiate.

    Returns:
        [R', D], new: by expert, then by source rank, token and choice; so bits do not depend on what comes first. If R'
        is a bound, zeros follow.

    Raises:
        ValueError: x does not have the routes' tokens, or, if kernels move rows, a dtype that they do not take; an
            arena in which no column of all rows fits.
        CallMismatch, PeerError: over an arena, ranks make different calls; a peer did not take part.

    Cost: dispatch_work. Through an arena t*D elements written, and R'*D read from their owners' memory; if R' is a
        bound, zeros are written up to it.
    Numerics: none, rows are copied; backward adds in promote_types(dtype, float32). Order: returns when all ranks have
        published theirs. Source: Lepikhin et al., "GShard", arXiv 2006.16668; without capacity: Gale et al.,
        "MegaBlocks", arXiv 2211.15841.
    """
    problem = _problem("dispatch", x, routes, len(routes.weights), "its tokens")
    if problem:
        comm.refuse(x, problem)
    refuse_tangents("dispatch", x)
    rows: Tensor = _dispatch(x, *_taken_apart(routes, routes.weights.detach(), comm))
    return rows


def combine(h: Tensor, routes: Routes, comm: Communicator) -> Tensor:
    """Bring the experts' results back to the owners of the tokens, who add them up.

        y[t, D] = sum over j of weights[t, j] * (row of h of (t, j)), in the order of the choice
        dh[R', D] = weights * dy, at the experts' owner;  dweights[t, j] = <dy[t], row of h of (t, j)>

    Args:
        h: [R', D], in the order of dispatch's rows.
        routes: as dispatch was given them; routes.weights get their gradient here, and so does the router.
        comm: as dispatch.

    Returns:
        [t, D] of h's dtype, new.

    Raises:
        As `dispatch`.

    Cost: combine_work; R*D elements kept for dweights. Numerics: the k terms are added in promote_types(dtype,
    float32), in the order of the choice: the same bits on every run, and for every number of ranks that gives the same
    rows. Source: as dispatch.
    """
    problem = _problem("combine", h, routes, routes.num_rows, "the rows of dispatch")
    if problem:
        comm.refuse(h, problem)
    refuse_tangents("combine", h, routes.weights)
    keeps = torch.is_grad_enabled() and (h.requires_grad or routes.weights.requires_grad)
    y: Tensor = _combine(h, keeps, *_taken_apart(routes, routes.weights, comm))[0]
    return y


def _problem(name: str, x: Tensor, routes: Routes, num_rows: int, what: str) -> str:
    if x.ndim != 2 or len(x) != num_rows or not x.is_floating_point():
        got = f"{tuple(x.shape)} {x.dtype}"
        return f"{name} needs {what}, {num_rows} rows of floating-point numbers: got {got}: pass those"
    if isinstance(routes, BoundedRoutes) and x.dtype not in KERNEL_DTYPES:
        return f"{name} by kernels moves float16, bfloat16 and float32: got {x.dtype}: pass no most_tokens to routes_of"
    return ""
