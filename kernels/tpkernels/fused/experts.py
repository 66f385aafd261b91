"""dispatch and combine: the rows of tokens to the owners of their experts, and the experts' results back.

    rows[R', D] = dispatch(x[t, D])      row of (token, choice) = x[token], at the owner of its expert
    y[t, D]     = combine(h[R', D])      y[token] = sum over j of weights[token, j] * (row of h of (token, j))

    dispatch's backward:  dx = combine(drows) with weights of 1
    combine's backward:   dh = dispatch(dy) times the weights;  dweights[token, j] = <dy[token], row of h of (token, j)>

The token's owner adds its k terms in the order of the choice, in promote_types(dtype, float32). Where rows lie, and the
ways that they travel, is in exchange/experts.py. Here are the specification, the registration with torch.library and
the public functions. They stand here, and not beside the exchange, because fusing them with the grouped products keeps
this contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.derivatives import differentiable_once, refuse_tangents
from tpkernels.exchange.communicator import Communicator, communicator_named
from tpkernels.exchange.experts import (
    Routes,
    combine_gradients,
    exchange_counts,
    rows_to_experts,
    rows_to_tokens,
)
from tpkernels.fused.ordered import exchanges
from tpkernels.ops.experts.order import sort_forward
from tpkernels.ops.experts.route import Routing
from tpkernels.ops.experts.rows import combine_forward, take_backward


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


@torch.library.custom_op("tpkernels::dispatch", mutates_args=())
def _dispatch(
    x: Tensor, order: Tensor, places: Tensor, weights: Tensor, counts: Tensor, num_rows: int, group: str
) -> Tensor:
    return rows_to_experts(x, Routes(order, places, weights, order, counts, num_rows), communicator_named(group))


@exchanges(_dispatch)
def _(x: Tensor, order: Tensor, places: Tensor, weights: Tensor, counts: Tensor, num_rows: int, group: str) -> Tensor:
    return x.new_empty(num_rows, x.shape[1])


@torch.library.custom_op("tpkernels::dispatch_backward", mutates_args=())
def _dispatch_backward(
    drows: Tensor, order: Tensor, places: Tensor, weights: Tensor, counts: Tensor, group: str
) -> Tensor:
    routes = Routes(order, places, weights, order, counts, len(drows))
    return take_backward(rows_to_tokens(drows, routes, communicator_named(group)), places, routes.num_choices)


@exchanges(_dispatch_backward)
def _(drows: Tensor, order: Tensor, places: Tensor, weights: Tensor, counts: Tensor, group: str) -> Tensor:
    return drows.new_empty(weights.shape[0], drows.shape[1])


@torch.library.custom_op("tpkernels::combine", mutates_args=())
def _combine(
    h: Tensor, order: Tensor, places: Tensor, weights: Tensor, counts: Tensor, keeps: bool, group: str
) -> list[Tensor]:
    comm = communicator_named(group)
    ys = rows_to_tokens(h, Routes(order, places, weights, order, counts, len(h)), comm)
    y = combine_forward(ys, places, weights)
    return [y, ys] if keeps and ys is not h else [y]


@exchanges(_combine)
def _(
    h: Tensor, order: Tensor, places: Tensor, weights: Tensor, counts: Tensor, keeps: bool, group: str
) -> list[Tensor]:
    y = h.new_empty(weights.shape[0], h.shape[1])
    return [y, h.new_empty(order.shape[0], h.shape[1])] if keeps and communicator_named(group).size > 1 else [y]


@torch.library.custom_op("tpkernels::combine_backward", mutates_args=())
def _combine_backward(
    dy: Tensor, ys: Tensor, order: Tensor, places: Tensor, weights: Tensor, counts: Tensor, num_rows: int, group: str
) -> tuple[Tensor, Tensor]:
    routes = Routes(order, places, weights, order, counts, num_rows)
    dh, dweights = combine_gradients(dy, ys, routes, communicator_named(group))
    assert dh is not None and dweights is not None, "asked for"
    return dh, dweights


@exchanges(_combine_backward)
def _(
    dy: Tensor, ys: Tensor, order: Tensor, places: Tensor, weights: Tensor, counts: Tensor, num_rows: int, group: str
) -> tuple[Tensor, Tensor]:
    return dy.new_empty(num_rows, dy.shape[1]), weights.new_empty(weights.shape)


def _keep_for_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, places, weights, counts, _, ctx.group = inputs
    ctx.save_for_backward(order, places, weights, counts)


@differentiable_once
def _of_dispatch(ctx: Any, drows: Tensor) -> tuple[Any, ...]:
    return _dispatch_backward(drows, *ctx.saved_tensors, ctx.group), None, None, None, None, None, None


def _keep_for_combine(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    h, order, places, weights, counts, _, ctx.group = inputs
    # With one rank the rows at the token's owner are those of the expert's.
    ctx.save_for_backward(output[-1] if len(output) > 1 else h, order, places, weights, counts)
    ctx.num_rows = h.shape[0]
    ctx.set_materialize_grads(False)


@differentiable_once
def _of_combine(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    dy = grads[0]
    assert dy is not None, "y has a gradient"
    dh, dweights = _combine_backward(dy, *ctx.saved_tensors, ctx.num_rows, ctx.group)
    return dh, None, None, dweights, None, None, None


_dispatch.register_autograd(_of_dispatch, setup_context=_keep_for_dispatch)
_combine.register_autograd(_of_combine, setup_context=_keep_for_combine)


@torch.compiler.disable  # the host waits in here
def routes_of(routing: Routing, comm: Communicator) -> Routes:
    """Return where the rows of all ranks' tokens go; collective, once for each layer and micro-batch.

    Args:
        routing: of this rank's tokens, as `route` returns it.
        comm: the N ranks that share the experts, E/N consecutive ones each.

    Raises:
        ValueError, CallMismatch, PeerError: as exchange_counts.

    Cost: a sort (sort_by_expert), and E + 2 numbers to each rank, for which the host waits.
    """
    order, _, places = sort_forward(routing.experts, len(routing.counts))
    return exchange_counts(order, places, routing.weights, routing.counts, comm)


def dispatch(x: Tensor, routes: Routes, comm: Communicator) -> Tensor:
    """Bring the rows of this rank's tokens to the owners of the experts that they chose.

        rows[R', D] = dispatch(x[t, D]);  routes.offsets say which rows are whose
        dx[t, D] = the k rows of drows of each token, added in the order of the choice

    Args:
        x: [t, D] of float16, bfloat16, float32 or float64: this rank's tokens.
        routes: of this micro-batch (routes_of).
        comm: the ranks that share the experts. The caller keeps it alive until nothing is left to differentiate.

    Returns:
        [R', D], new: by expert, then by source rank, token and choice; so bits do not depend on what comes first.

    Raises:
        ValueError: x does not have the routes' tokens; an arena in which no column of all rows fits.
        CallMismatch, PeerError: over an arena, ranks make different calls; a peer did not take part.

    Cost: dispatch_work. Through an arena t*D elements written, and R'*D read from their owners' memory.
    Numerics: none, rows are copied; backward adds in promote_types(dtype, float32). Order: returns when all ranks have
        published theirs. Source: Lepikhin et al., "GShard", arXiv 2006.16668; without capacity: Gale et al.,
        "MegaBlocks", arXiv 2211.15841.
    """
    problem = _problem("dispatch", x, len(routes.weights), "its tokens")
    if problem:
        comm.refuse(x, problem)
    refuse_tangents("dispatch", x)
    weights = routes.weights.detach()
    rows: Tensor = _dispatch(x, routes.order, routes.places, weights, routes.counts, routes.num_rows, comm.name)
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
    problem = _problem("combine", h, routes.num_rows, "the rows of dispatch")
    if problem:
        comm.refuse(h, problem)
    refuse_tangents("combine", h, routes.weights)
    keeps = torch.is_grad_enabled() and (h.requires_grad or routes.weights.requires_grad)
    outputs = _combine(h, routes.order, routes.places, routes.weights, routes.counts, keeps, comm.name)
    return outputs[0]


def _problem(name: str, x: Tensor, num_rows: int, what: str) -> str:
    if x.ndim == 2 and len(x) == num_rows and x.is_floating_point():
        return ""
    return f"{name} needs {what}, {num_rows} rows of floating-point numbers: got {tuple(x.shape)} {x.dtype}: pass those"
