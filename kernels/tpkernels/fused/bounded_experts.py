"""The operators of rows that kernels move, as torch.library knows them; public functions are in experts.py.

Each takes the tensors of BoundedRoutes one by one, since schemas carry tensors, numbers and a group's name only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.derivatives import differentiable_once
from tpkernels.exchange.communicator import Communicator, communicator_named
from tpkernels.fused.bounded_rows import BoundedRoutes
from tpkernels.fused.expert_rows import combine_gradients, rows_to_experts, rows_to_sums
from tpkernels.fused.ordered import exchanges


def dispatch_bounded(x: Tensor, routes: BoundedRoutes, comm: Communicator) -> Tensor:
    """Run `dispatch` of experts.py, without its checks."""
    rows: Tensor = _dispatch(x, *_parts(routes, routes.weights.detach()), comm.name)
    return rows


def combine_bounded(h: Tensor, routes: BoundedRoutes, comm: Communicator, keeps: bool) -> Tensor:
    """Run `combine` of experts.py, without its checks."""
    y: Tensor = _combine(h, *_parts(routes, routes.weights), keeps, comm.name)[0]
    return y


def _parts(routes: BoundedRoutes, weights: Tensor) -> tuple[Any, ...]:
    tensors = routes.order, routes.places, weights, routes.segments, routes.offsets, routes.spilled
    return *tensors, routes.num_rows, routes.most_tokens


def _routes(
    order: Tensor,
    places: Tensor,
    weights: Tensor,
    segments: Tensor,
    offsets: Tensor,
    spilled: Tensor,
    bound: int,
    most_tokens: int,
) -> BoundedRoutes:
    return BoundedRoutes(order, places, weights, offsets, segments[0].t(), bound, segments, spilled, most_tokens)


@torch.library.custom_op("tpkernels::dispatch_bounded", mutates_args=())
def _dispatch(
    x: Tensor,
    order: Tensor,
    places: Tensor,
    weights: Tensor,
    segments: Tensor,
    offsets: Tensor,
    spilled: Tensor,
    bound: int,
    most_tokens: int,
    group: str,
) -> Tensor:
    routes = _routes(order, places, weights, segments, offsets, spilled, bound, most_tokens)
    return rows_to_experts(x, routes, communicator_named(group))


@exchanges(_dispatch)
def _(x: Tensor, *rest: Any) -> Tensor:
    bound = rest[6]
    return x.new_empty(bound, x.shape[1])


@torch.library.custom_op("tpkernels::dispatch_bounded_backward", mutates_args=())
def _dispatch_backward(
    drows: Tensor,
    order: Tensor,
    places: Tensor,
    weights: Tensor,
    segments: Tensor,
    offsets: Tensor,
    spilled: Tensor,
    bound: int,
    most_tokens: int,
    group: str,
) -> Tensor:
    routes = _routes(order, places, weights, segments, offsets, spilled, bound, most_tokens)
    return rows_to_sums(drows, routes, communicator_named(group), weighted=False, keeps=False)[0]


@exchanges(_dispatch_backward)
def _(drows: Tensor, order: Tensor, places: Tensor, weights: Tensor, *rest: Any) -> Tensor:
    return drows.new_empty(weights.shape[0], drows.shape[1])


@torch.library.custom_op("tpkernels::combine_bounded", mutates_args=())
def _combine(
    h: Tensor,
    order: Tensor,
    places: Tensor,
    weights: Tensor,
    segments: Tensor,
    offsets: Tensor,
    spilled: Tensor,
    bound: int,
    most_tokens: int,
    keeps: bool,
    group: str,
) -> list[Tensor]:
    routes = _routes(order, places, weights, segments, offsets, spilled, bound, most_tokens)
    y, ys = rows_to_sums(h, routes, communicator_named(group), weighted=True, keeps=keeps)
    return [y] if ys is None else [y, ys]


@exchanges(_combine)
def _(h: Tensor, order: Tensor, places: Tensor, weights: Tensor, *rest: Any) -> list[Tensor]:
    y, keeps = h.new_empty(weights.shape[0], h.shape[1]), rest[-2]
    return [y, h.new_empty(order.shape[0], h.shape[1])] if keeps else [y]


@torch.library.custom_op("tpkernels::combine_bounded_backward", mutates_args=())
def _combine_backward(
    dy: Tensor,
    ys: Tensor,
    order: Tensor,
    places: Tensor,
    weights: Tensor,
    segments: Tensor,
    offsets: Tensor,
    spilled: Tensor,
    bound: int,
    most_tokens: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    routes = _routes(order, places, weights, segments, offsets, spilled, bound, most_tokens)
    dh, dweights = combine_gradients(dy, ys, routes, communicator_named(group))
    assert dh is not None and dweights is not None, "asked for"
    return dh, dweights


@exchanges(_combine_backward)
def _(dy: Tensor, ys: Tensor, order: Tensor, places: Tensor, weights: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    bound = rest[3]
    return dy.new_empty(bound, dy.shape[1]), weights.new_empty(weights.shape)


def _keep_for_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *tensors, ctx.bound, ctx.most_tokens, ctx.group = inputs
    ctx.save_for_backward(*tensors)


@differentiable_once
def _of_dispatch(ctx: Any, drows: Tensor) -> tuple[Any, ...]:
    dx = _dispatch_backward(drows, *ctx.saved_tensors, ctx.bound, ctx.most_tokens, ctx.group)
    return dx, *(None,) * 9


def _keep_for_combine(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, *tensors, ctx.bound, ctx.most_tokens, _, ctx.group = inputs
    ctx.save_for_backward(output[-1], *tensors)
    ctx.set_materialize_grads(False)


@differentiable_once
def _of_combine(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    dy = grads[0]
    assert dy is not None, "y has a gradient"
    dh, dweights = _combine_backward(dy, *ctx.saved_tensors, ctx.bound, ctx.most_tokens, ctx.group)
    return dh, None, None, dweights, *(None,) * 7


_dispatch.register_autograd(_of_dispatch, setup_context=_keep_for_dispatch)
_combine.register_autograd(_of_combine, setup_context=_keep_for_combine)
