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
from tpkernels.exchange.experts import Routes, rows_to_experts, rows_to_tokens
from tpkernels.fused.ordered import exchanges


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
    x: Tensor, order: Tensor, weights: Tensor, counts: Tensor, num_rows: int, scaled: bool, group: str
) -> Tensor:
    routes = Routes(order, weights, order, counts, num_rows)
    return rows_to_experts(x, routes, communicator_named(group), scaled=scaled)


@exchanges(_dispatch)
def _(x: Tensor, order: Tensor, weights: Tensor, counts: Tensor, num_rows: int, scaled: bool, group: str) -> Tensor:
    return x.new_empty(num_rows, x.shape[1])


@torch.library.custom_op("tpkernels::combine", mutates_args=())
def _combine(
    h: Tensor, order: Tensor, weights: Tensor, counts: Tensor, scaled: bool, keeps: bool, group: str
) -> list[Tensor]:
    comm = communicator_named(group)
    ys = rows_to_tokens(h, Routes(order, weights, order, counts, len(h)), comm)
    y = _added(ys, order, weights, scaled=scaled)
    return [y, ys] if keeps and ys is not h else [y]


@exchanges(_combine)
def _(h: Tensor, order: Tensor, weights: Tensor, counts: Tensor, scaled: bool, keeps: bool, group: str) -> list[Tensor]:
    y = h.new_empty(weights.shape[0], h.shape[1])
    return [y, h.new_empty(order.shape[0], h.shape[1])] if keeps and communicator_named(group).size > 1 else [y]


def _added(ys: Tensor, order: Tensor, weights: Tensor, *, scaled: bool) -> Tensor:
    """Return y[t, D]: the k terms of each token, added in the order of the choice."""
    tokens, choices = weights.shape
    row_of = _by_pair(torch.arange(len(order), device=order.device), order)
    wide = torch.promote_types(ys.dtype, torch.float32)
    y = ys.new_zeros(tokens, ys.shape[1], dtype=wide)
    for choice in range(choices):
        term = ys.index_select(0, row_of[choice::choices]).to(wide)
        y += term * weights[:, choice, None] if scaled else term
    return y.to(ys.dtype)


def _by_pair(values: Tensor, order: Tensor) -> Tensor:
    """Return values[R] of the sorted rows by their pairs: token, then choice."""
    return torch.empty_like(values).index_copy_(0, order.long(), values)


def _keep_for_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, weights, counts, _, scaled, group = inputs
    ctx.save_for_backward(order, weights, counts)
    ctx.call = scaled, group


@differentiable_once
def _dispatch_backward(ctx: Any, drows: Tensor) -> tuple[Any, ...]:
    order, weights, counts = ctx.saved_tensors
    scaled, group = ctx.call
    dx = _combine(drows, order, weights, counts, scaled, False, group)[0]
    return dx, None, None, None, None, None, None


def _keep_for_combine(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    h, order, weights, counts, scaled, keeps, group = inputs
    # With one rank the rows at the token's owner are those of the expert's.
    ctx.save_for_backward(order, weights, counts, output[-1] if len(output) > 1 else h if keeps else None)
    ctx.call = h.shape[0], scaled, group
    ctx.set_materialize_grads(False)


@differentiable_once
def _combine_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    order, weights, counts, ys = ctx.saved_tensors
    num_rows, scaled, group = ctx.call
    dy = grads[0]
    assert dy is not None, "y has a gradient"
    dh = dweights = None
    if ctx.needs_input_grad[0]:
        dh = _dispatch(dy, order, weights, counts, num_rows, scaled, group)
    if ctx.needs_input_grad[2]:
        rows = dy.index_select(0, order // weights.shape[1]).to(weights.dtype)
        products = (rows * ys.to(weights.dtype)).sum(1)
        dweights = _by_pair(products, order).view(weights.shape)
    return dh, None, dweights, None, None, None, None


_dispatch.register_autograd(_dispatch_backward, setup_context=_keep_for_dispatch)
_combine.register_autograd(_combine_backward, setup_context=_keep_for_combine)


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
    return _dispatch(x, routes.order, routes.weights.detach(), routes.counts, routes.num_rows, False, comm.name)


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
    keeps = torch.is_grad_enabled() and routes.weights.requires_grad
    outputs = _combine(h, routes.order, routes.weights, routes.counts, True, keeps, comm.name)
    return outputs[0]


def _problem(name: str, x: Tensor, num_rows: int, what: str) -> str:
    if x.ndim == 2 and len(x) == num_rows and x.is_floating_point():
        return ""
    return f"{name} needs {what}, {num_rows} rows of floating-point numbers: got {tuple(x.shape)} {x.dtype}: pass those"
