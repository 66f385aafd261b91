"""matmul_reduce_scatter: the row-parallel matmul; it sends partial sums to the tokens' owners while it multiplies.

    y[T/tp, D]   = reduce_scatter_tp(x[T, F/tp] @ w[D, F/tp].T) + b
    dx[T, F/tp]  = all_gather_tp(dy[T/tp, D]) @ w
    dw           = all_gather_tp(dy).T @ x;  db = sum over T of all_gather_tp(dy)

Forward is `matmul_scatter` (scatter.py), and dx its dual `gather_matmul` (gather.py), which also returns the gathered
dy that dw needs. A gradient that is not needed is not kept, nor computed, except where kernels gather, because they
multiply at the same time. dy is always gathered, in the same way, so ranks may need different gradients. Here are the
specification, the registration with torch.library and the public function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.autocast import dtype_conflict, lowered
from tpkernels.derivatives import differentiable_once, refuse_tangents
from tpkernels.exchange.arena import shard_rows
from tpkernels.exchange.communicator import Communicator, communicator_named
from tpkernels.fused.gather import dtype_problem, gather_matmul, kernels_gather
from tpkernels.fused.ordered import exchanges
from tpkernels.fused.scatter import matmul_scatter

_NAME = "matmul_reduce_scatter"


def matmul_reduce_scatter_reference(
    xs: Sequence[Tensor], weights: Sequence[Tensor], rank: int, bias: Tensor | None = None
) -> Tensor:
    """Return the output of `rank`, from all ranks' x and w: the specification."""
    total = sum(x @ w.T for x, w in zip(xs, weights, strict=True))
    assert isinstance(total, Tensor), "there is at least one rank"
    y = total[shard_rows(len(total), len(xs), rank)]
    return y if bias is None else y + bias


@torch.library.custom_op("tpkernels::matmul_reduce_scatter", mutates_args=())
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    return matmul_scatter([(x, weight.T)], communicator_named(group), _NAME, bias=bias)


@exchanges(_forward)
def _(x: Tensor, weight: Tensor, bias: Tensor | None, group: str) -> Tensor:
    comm = communicator_named(group)
    rows = shard_rows(x.shape[0], comm.size, comm.rank)
    return x.new_empty(rows.stop - rows.start, weight.shape[0])


@torch.library.custom_op("tpkernels::matmul_reduce_scatter_dgrad", mutates_args=())
def _dgrad(dy: Tensor, weight: Tensor, group: str, num_tokens: int, keep_gathered: bool = True) -> list[Tensor]:
    # The default is for graphs in inductor's cache on disk that were compiled when the gathered dy was always kept.
    comm = communicator_named(group)
    (dx,), full = gather_matmul(dy, [weight], comm, num_tokens, _NAME, keep=keep_gathered)
    if full is None:
        return [dx]
    return [dx, full.clone() if full is dy else full]


@exchanges(_dgrad)
def _(dy: Tensor, weight: Tensor, group: str, num_tokens: int, keep_gathered: bool = True) -> list[Tensor]:
    dx = dy.new_empty(num_tokens, weight.shape[1])
    return [dx, dy.new_empty(num_tokens, dy.shape[1])] if keep_gathered else [dx]


@torch.library.custom_op("tpkernels::matmul_reduce_scatter_gather", mutates_args=())
def _gather(dy: Tensor, group: str, num_tokens: int) -> Tensor:
    # For the other ranks this must be the same exchange as `_dgrad`'s, in case they need dx; not so over kernels.
    full = communicator_named(group).all_gather_rows(dy, num_tokens, operation=_NAME)
    return full.clone() if full is dy else full


@exchanges(_gather)
def _(dy: Tensor, group: str, num_tokens: int) -> Tensor:
    return dy.new_empty(num_tokens, dy.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, group = inputs
    ctx.save_for_backward(x, weight)
    ctx.call = group, bias is not None


@differentiable_once
def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    group, has_bias = ctx.call
    needs_dx, needs_dw = ctx.needs_input_grad[:2]
    needs_dbias = has_bias and ctx.needs_input_grad[2]
    dx, full = None, None
    if needs_dx:
        dx, *kept = _dgrad(dy, weight, group, x.shape[0], needs_dw or needs_dbias)
        full = kept[0] if kept else None
    elif (needs_dw or needs_dbias) and not kernels_gather(dy, weight, communicator_named(group), x.shape[0]):
        full = _gather(dy, group, x.shape[0])
    elif needs_dw or needs_dbias:
        # Kernels gather while they multiply, by a strategy that depends on the product: so compute the product too.
        full = _dgrad(dy, weight, group, x.shape[0], True)[1]
    dw = full.T @ x if full is not None and needs_dw else None
    return dx, dw, full.sum(0) if full is not None and needs_dbias else None, None


_forward.register_autograd(_backward, setup_context=_setup_context)


def matmul_reduce_scatter(x: Tensor, weight: Tensor, comm: Communicator, *, bias: Tensor | None = None) -> Tensor:
    """Multiply by a weight whose inputs are cut over the ranks, sum, and keep this rank's tokens.

        y[T/tp, D] = reduce_scatter_tp(x[T, F/tp] @ w[D, F/tp].T) + b[D]
        dx[T, F/tp] = all_gather_tp(dy) @ w;  dw = all_gather_tp(dy).T @ x;  db = sum over T of all_gather_tp(dy)

    Args:
        x: [T, F/tp] of float16, bfloat16, float32 or float64 (which uses no kernel), all tokens.
        weight: w [D, F/tp].
        comm: the tp ranks. The caller keeps it alive until nothing is left to differentiate.
        bias: b [D], equal on all ranks, added once; its gradient is the same on all ranks.

    Returns:
        [ceil(T/tp), D] of x's dtype, on the last ranks fewer rows or none; a new tensor.

    Raises:
        ValueError: shapes or dtypes that do not fit; over an arena on every rank if they do not fit on one.
        PeerError: over an arena, a peer did not take part.

    Cost: 2*T*D*F/tp flops; (tp-1)/tp*T*D elements sent. Order: computes the rows of rank+1 first, its own last; returns
    when every peer's partial rows are added. Numerics: partial sums in x's dtype, added in a balanced tree
    of ranks in promote_types(dtype, float32) (by NCCL as it does): the same bits on every run.
    Source: as all_gather_matmul.
    """
    x, weight, bias = lowered(x, weight, bias)
    problem = matmul_problem(_NAME, x, weight, bias)
    if problem:
        comm.refuse(x, problem)
    refuse_tangents(_NAME, x, weight, bias)
    y: Tensor = _forward(x, weight, bias, comm.name)
    return y


def matmul_problem(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """Return what is wrong with the arguments of a row-parallel matmul; empty if nothing is."""

    def shapes() -> str:
        return f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"

    if x.ndim != 2 or weight.ndim != 2 or weight.shape[1] != x.shape[1]:
        return f"{name} needs x[T, F/tp] and weight [D, F/tp]: {shapes()}: give the weight x's last dim"
    others = (weight,) if bias is None else (weight, bias)
    if problem := dtype_conflict(name, x, others):
        return problem
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"{name} needs a bias [D]: bias {tuple(bias.shape)}, {shapes()}: pass one number per row of the weight"
    return dtype_problem(name, x)
