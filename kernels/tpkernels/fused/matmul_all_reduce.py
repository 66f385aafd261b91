"""matmul_all_reduce: the row-parallel matmul without sequence shards; every rank keeps every token.

    y[T, D]     = all_reduce_tp(x[T, F/tp] @ w[D, F/tp].T) + b
    dx[T, F/tp] = dy[T, D] @ w;  dw = dy.T @ x;  db = sum over T of dy       dy equal on all ranks

The matmul ends in a reduce-scatter, then the sums are gathered: each token is added on one rank only, so all ranks have
the same bits. Backward needs no communication; the dual is a column-parallel matmul of replicated tokens, whose dx is
all-reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.autocast import lowered
from tpkernels.derivatives import differentiable_once, refuse_tangents
from tpkernels.exchange.communicator import Communicator, communicator_named
from tpkernels.fused.matmul_reduce_scatter import matmul_problem
from tpkernels.fused.ordered import exchanges
from tpkernels.fused.scatter import matmul_then_gather

_NAME = "matmul_all_reduce"


def matmul_all_reduce_reference(xs: Sequence[Tensor], weights: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    """Return the output of every rank, from all ranks' x and w: the specification."""
    total = sum(x @ w.T for x, w in zip(xs, weights, strict=True))
    assert isinstance(total, Tensor), "there is at least one rank"
    return total if bias is None else total + bias


@torch.library.custom_op("tpkernels::matmul_all_reduce", mutates_args=())
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    return matmul_then_gather(x, weight.T, communicator_named(group), _NAME, bias)


@exchanges(_forward)
def _(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


@differentiable_once
def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    dx = dy @ weight if ctx.needs_input_grad[0] else None
    dw = dy.T @ x if ctx.needs_input_grad[1] else None
    return dx, dw, dy.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None, None


_forward.register_autograd(_backward, setup_context=_setup_context)


def matmul_all_reduce(x: Tensor, weight: Tensor, comm: Communicator, *, bias: Tensor | None = None) -> Tensor:
    """Multiply by a weight whose inputs are cut over the ranks, and sum over the ranks.

        y[T, D] = all_reduce_tp(x[T, F/tp] @ w[D, F/tp].T) + b[D]
        dx[T, F/tp] = dy @ w;  dw = dy.T @ x;  db = sum over T of dy

    Args:
        x: [T, F/tp] of float16, bfloat16, float32 or float64 (which uses no kernel), all tokens.
        weight: w [D, F/tp].
        comm: the tp ranks.
        bias: b [D], equal on all ranks, added once.

    Returns:
        [T, D] of x's dtype, the same bits on all ranks; a new tensor.

    Raises:
        ValueError: shapes or dtypes that do not fit; over an arena on every rank if they do not fit on one.
        PeerError: over an arena, a peer did not take part.

    dy must be equal on all ranks. It is if all ranks do the same with y.

    Cost: 2*T*D*F/tp flops; 2*(tp-1)/tp*T*D elements sent. Numerics: as matmul_reduce_scatter.
    Source: Shoeybi et al., arXiv 1909.08053, section 3.
    """
    x, weight, bias = lowered(x, weight, bias)
    problem = matmul_problem(_NAME, x, weight, bias)
    if problem:
        comm.refuse(x, problem)
    refuse_tangents(_NAME, x, weight, bias)
    y: Tensor = _forward(x, weight, bias, comm.name)
    return y
