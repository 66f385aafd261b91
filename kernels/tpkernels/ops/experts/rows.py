"""Rows of tokens in the order of their experts, and back: take_rows and combine_rows.

    take_rows:     xs[R, D] = x[order // k];           dx[t] = sum over j of dxs[places[t, j]]
    combine_rows:  y[t] = sum over j of weights[t, j] * ys[places[t, j]]
                   dys[r] = weights[order[r]] * dy[order[r] // k];  dweights[t, j] = <dy[t], ys[places[t, j]]>

R = T * k; `places` is the inverse of `order` (order.py): the row of token t's choice j. The k terms of a token are
added in the order of its choice, in float32, by one program: no atomics, and the bits do not depend on the other tokens
or on which experts they chose.

The decision a reader will question: both sums gather, so that each output row has one writer; adding sorted rows to
their tokens would need atomics, or the order of the experts. The price is `places`, 4 bytes per row.

Source: Gale et al., "MegaBlocks", arXiv 2211.15841, section 5.2 (gather and scatter of rows, without a capacity).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels.derivatives import differentiable_once, refuse_tangents
from tpkernels.launch import accumulation_dtype, by_triton, cdiv, jit, power_of_2, run, tl, widened
from tpkernels.ops.experts.order import places_of

# Rows of a token at a time on the host: they stay in a core's cache between two operations.
_HOST_ROWS = 256


def take_rows_reference(x: Tensor, order: Tensor, k: int) -> Tensor:
    """Return xs in x's dtype: the specification."""
    return x[order.long() // k]


def combine_rows_reference(ys: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return y computed in ys's dtype: the specification."""
    rows = torch.zeros_like(ys).index_copy(0, order.long(), ys).view(*weights.shape, ys.shape[1])
    return (rows * weights[:, :, None].to(ys.dtype)).sum(1)


@jit
def _take_rows_kernel(
    p_x: tl.tensor,
    p_order: tl.tensor,
    p_xs: tl.tensor,
    num_columns: tl.int32,
    stride_x: tl.int64,
    K: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Copy BLOCK_COLUMNS columns of one row per program."""
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    m_column = o_column < num_columns
    i_token = (tl.load(p_order + i_row) // K).to(tl.int64)
    # [BLOCK_COLUMNS]
    b_x = tl.load(p_x + i_token * stride_x + o_column, mask=m_column, other=0.0)
    tl.store(p_xs + i_row * num_columns + o_column, b_x, mask=m_column)


@jit
def _add_rows_kernel(
    p_rows: tl.tensor,
    p_places: tl.tensor,
    p_weights: tl.tensor,
    p_y: tl.tensor,
    num_columns: tl.int32,
    stride_rows: tl.int64,
    K: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Add BLOCK_COLUMNS columns of the k rows of one token per program, weighted if there are weights."""
    i_token = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    m_column = o_column < num_columns
    b_sum = widened(tl.zeros([BLOCK_COLUMNS], p_rows.dtype.element_ty))
    for j in range(K):
        i_row = tl.load(p_places + i_token * K + j).to(tl.int64)
        # [BLOCK_COLUMNS]
        b_row = widened(tl.load(p_rows + i_row * stride_rows + o_column, mask=m_column, other=0.0))
        if p_weights is not None:
            b_row *= tl.load(p_weights + i_token * K + j).to(b_row.dtype)
        b_sum += b_row
    tl.store(p_y + i_token * num_columns + o_column, b_sum.to(p_y.dtype.element_ty), mask=m_column)


@jit
def _combine_rows_backward_kernel(
    p_dy: tl.tensor,
    p_ys: tl.tensor,
    p_places: tl.tensor,
    p_weights: tl.tensor,
    p_dys: tl.tensor,
    p_dweights: tl.tensor,
    num_columns: tl.int32,
    stride_dy: tl.int64,
    stride_ys: tl.int64,
    K: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Write the k rows of dys, unless it is None, and the k dweights of one token per program."""
    i_token = tl.program_id(0).to(tl.int64)
    o_choice = tl.arange(0, BLOCK_K)
    b_dweights = widened(tl.zeros([BLOCK_K], p_ys.dtype.element_ty))
    for first in range(0, num_columns, BLOCK_COLUMNS):
        o_column = first + tl.arange(0, BLOCK_COLUMNS)
        m_column = o_column < num_columns
        # [BLOCK_COLUMNS]
        b_dy = widened(tl.load(p_dy + i_token * stride_dy + o_column, mask=m_column, other=0.0))
        for j in range(K):
            i_row = tl.load(p_places + i_token * K + j).to(tl.int64)
            # [BLOCK_COLUMNS]
            b_ys = widened(tl.load(p_ys + i_row * stride_ys + o_column, mask=m_column, other=0.0))
            b_dweights += tl.where(o_choice == j, tl.sum(b_dy * b_ys, axis=0), 0.0)
            if p_dys is not None:
                b_dys = b_dy * tl.load(p_weights + i_token * K + j).to(b_dy.dtype)
                tl.store(p_dys + i_row * num_columns + o_column, b_dys.to(p_dys.dtype.element_ty), mask=m_column)
    tl.store(p_dweights + i_token * K + o_choice, b_dweights.to(p_dweights.dtype.element_ty), mask=o_choice < K)


def _block(num_columns: int, most: int = 1024) -> dict[str, int]:
    """Return the columns per program, for four warps: 16 bytes per thread in 16 bits. Not tuned on a GPU yet."""
    return {"BLOCK_COLUMNS": min(most, power_of_2(num_columns)), "num_warps": 4}


def launch_take_rows(x: Tensor, order: Tensor, k: int) -> Tensor:
    """Run the operator tpkernels::take_rows with its kernel."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_rows, num_columns = len(order), x.shape[1]
    xs = x.new_empty(num_rows, num_columns)
    block = _block(num_columns)
    grid = (num_rows, cdiv(num_columns, block["BLOCK_COLUMNS"]))
    run(_take_rows_kernel, grid, x, order.contiguous(), xs, num_columns, x.stride(0), K=k, **block)
    return xs


def launch_add_rows(rows: Tensor, places: Tensor, weights: Tensor | None, k: int) -> Tensor:
    """Return the sums over each token's k rows in rows' dtype, by the kernel."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_tokens, num_columns = len(places) // k, rows.shape[1]
    y = rows.new_empty(num_tokens, num_columns)
    block = _block(num_columns)
    run(
        _add_rows_kernel,
        (num_tokens, cdiv(num_columns, block["BLOCK_COLUMNS"])),
        rows,
        places.contiguous(),
        None if weights is None else weights.contiguous(),
        y,
        num_columns,
        rows.stride(0),
        K=k,
        **block,
    )
    return y


def launch_combine_rows_backward(dy: Tensor, ys: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Run the operator tpkernels::combine_rows_backward with its kernel."""
    dys = ys.new_empty(ys.shape)
    return dys, _launch_gradients(dy, ys, places, weights, dys)


def launch_weight_gradients(dy: Tensor, ys: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Return dweights alone, with the bits that launch_combine_rows_backward gives them."""
    return _launch_gradients(dy, ys, places, weights, None)


def _launch_gradients(dy: Tensor, ys: Tensor, places: Tensor, weights: Tensor, dys: Tensor | None) -> Tensor:
    """Return dweights, and write dys if there is one."""
    dy, ys = (t if t.stride(1) == 1 else t.contiguous() for t in (dy, ys))
    (num_tokens, k), num_columns = weights.shape, ys.shape[1]
    dweights = weights.new_empty(weights.shape)
    run(
        _combine_rows_backward_kernel,
        (num_tokens,),
        dy,
        ys,
        places.contiguous(),
        weights.contiguous(),
        dys,
        dweights,
        num_columns,
        dy.stride(0),
        ys.stride(0),
        K=k,
        BLOCK_K=power_of_2(k),
        # With 1024 columns a kernel in float32 spills on sm_80.
        **_block(num_columns, most=512),
    )
    return dweights


def _add_on_host(rows: Tensor, places: Tensor, weights: Tensor | None, k: int) -> Tensor:
    if not rows.numel():
        return rows.new_zeros(len(places) // k, rows.shape[1])
    wide = rows.to(accumulation_dtype(rows.dtype)).contiguous()
    weights = None if weights is None else weights.to(wide.dtype)
    y = F.embedding_bag(places.view(-1, k), wide, per_sample_weights=weights, mode="sum")
    return y.to(rows.dtype)


def _combine_backward_on_host(
    dy: Tensor, ys: Tensor, order: Tensor, places: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    wide = accumulation_dtype(ys.dtype)
    dys, products = torch.empty_like(ys, memory_format=torch.contiguous_format), ys.new_empty(len(ys), dtype=wide)
    tokens = order // weights.shape[1]
    sorted_weights = weights.reshape(-1).index_select(0, order).to(wide)[:, None]
    for first in range(0, len(ys), _HOST_ROWS):
        some = slice(first, first + _HOST_ROWS)
        rows = dy.index_select(0, tokens[some]).to(wide)
        dys[some] = rows * sorted_weights[some]
        torch.sum(rows.mul_(ys[some]), 1, out=products[some])
    return dys, products.index_select(0, places).view(weights.shape).to(weights.dtype)


def take_forward(x: Tensor, order: Tensor, k: int) -> Tensor:
    """Run `take_rows_op` without torch's dispatcher, for callers inside a Function of their own."""
    return launch_take_rows(x, order, k) if by_triton(x) else x.index_select(0, order // k)


def take_backward(dxs: Tensor, places: Tensor, k: int) -> Tensor:
    """Return dx[T, D] in dxs's dtype, new and contiguous; places as `sort_forward` returns them."""
    return (launch_add_rows if by_triton(dxs) else _add_on_host)(dxs, places, None, k)


def combine_forward(ys: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Run `combine_rows_op` without torch's dispatcher; places as `sort_forward` returns them."""
    return (launch_add_rows if by_triton(ys) else _add_on_host)(ys, places, weights, weights.shape[1])


def combine_backward(dy: Tensor, ys: Tensor, order: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return dys[R, D] in ys's dtype and dweights[T, k] in weights', new and contiguous."""
    if by_triton(ys):
        return launch_combine_rows_backward(dy, ys, places, weights)
    return _combine_backward_on_host(dy, ys, order, places, weights)


@torch.library.custom_op("tpkernels::take_rows", mutates_args=())
def take_rows_op(x: Tensor, order: Tensor, k: int) -> Tensor:
    """Return xs[R, D], new and contiguous."""
    return take_forward(x, order, k)


@take_rows_op.register_fake
def _(x: Tensor, order: Tensor, k: int) -> Tensor:
    return x.new_empty(order.shape[0], x.shape[1])


@torch.library.custom_op("tpkernels::take_rows_backward", mutates_args=())
def take_rows_backward_op(dxs: Tensor, order: Tensor, k: int) -> Tensor:
    """Return dx[T, D], new and contiguous."""
    return take_backward(dxs, places_of(order), k)


@take_rows_backward_op.register_fake
def _(dxs: Tensor, order: Tensor, k: int) -> Tensor:
    return dxs.new_empty(order.shape[0] // k, dxs.shape[1])


def _take_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, ctx.k = inputs
    ctx.save_for_backward(order)


@differentiable_once
def _take_backward(ctx: Any, dxs: Tensor) -> tuple[Tensor | None, ...]:
    return take_rows_backward_op(dxs, *ctx.saved_tensors, ctx.k), None, None


take_rows_op.register_autograd(_take_backward, setup_context=_take_context)


@torch.library.custom_op("tpkernels::combine_rows", mutates_args=())
def combine_rows_op(ys: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Return y[T, D], new and contiguous."""
    return combine_forward(ys, places_of(order), weights)


@combine_rows_op.register_fake
def _(ys: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    return ys.new_empty(weights.shape[0], ys.shape[1])


@torch.library.custom_op("tpkernels::combine_rows_backward", mutates_args=())
def combine_rows_backward_op(dy: Tensor, ys: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return dys[R, D] and dweights[T, k], new and contiguous."""
    return combine_backward(dy, ys, order, places_of(order), weights)


@combine_rows_backward_op.register_fake
def _(dy: Tensor, ys: Tensor, order: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return ys.new_empty(ys.shape), weights.new_empty(weights.shape)


def _combine_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


@differentiable_once
def _combine_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dys, dweights = combine_rows_backward_op(dy, *ctx.saved_tensors)
    return dys, None, dweights


combine_rows_op.register_autograd(_combine_backward, setup_context=_combine_context)


def _check(name: str, rows: Tensor, order: Tensor, fits: bool, wanted: str) -> None:
    if rows.dim() != 2 or not rows.is_floating_point() or order.dtype != torch.int32 or order.dim() != 1 or not fits:
        raise ValueError(
            f"{name} takes {wanted}, order int32 [T * k]: they are {tuple(rows.shape)} {rows.dtype}, order "
            f"{tuple(order.shape)} {order.dtype}: pass the order that sort_by_expert returns for these tokens"
        )


def take_rows(x: Tensor, order: Tensor, k: int) -> Tensor:
    """Take the rows of tokens in the order of their experts, each k times.

        xs[R, D] = x[order // k];    dx[t] = the sum of the k rows of token t in dxs, in the order of its choice

    Args:
        x: [T, D], floating point, any strides.
        order: int32 [R], R = T * k, as `sort_by_expert` returns it: each pair once.
        k: choices of a token.

    Returns:
        xs [R, D] of x's dtype, new and contiguous.

    Raises:
        ValueError: what does not fit.

    Cost: forward reads and writes R rows; backward reads R rows and writes T; keeps order alone.
    Numerics: forward is exact; backward adds in float32, or float64 for float64, and rounds once; deterministic.
    Source: see the module.
    """
    fits = k >= 1 and x.dim() == 2 and order.numel() == x.shape[0] * k
    _check("take_rows", x, order, fits, f"x[T, D] of floating-point numbers and k of at least 1, here {k}")
    refuse_tangents("take_rows", x)
    xs: Tensor = take_rows_op(x, order, k)
    return xs


def combine_rows(ys: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Add the k rows of each token, weighted, in the order of its choice.

        y[T, D]: y[t] = sum over j of weights[t, j] * ys[r],  order[r] = t * k + j
        dys[r] = weights[t, j] * dy[t];  dweights[t, j] = <dy[t], ys[r]>

    Args:
        ys: [R, D], floating point, any strides: rows in the order of their experts, R = T * k.
        order: int32 [R], as `sort_by_expert` returns it: each pair once.
        weights: [T, k], floating point, as `route` returns them.

    Returns:
        y [T, D] of ys's dtype, new and contiguous.

    Raises:
        ValueError: what does not fit.

    Cost: forward reads R rows and writes T; backward reads R + T rows and writes R. Keeps ys, order and weights.
    Numerics: products and sums in float32, or float64 for float64, rounded once; deterministic. A token's bits do not
    depend on the others.
    Source: see the module.
    """
    fits = weights.dim() == 2 and weights.is_floating_point() and ys.shape[0] == order.numel() == weights.numel()
    wanted = f"ys[T * k, D] and weights[T, k] of floating-point numbers, here {tuple(weights.shape)} {weights.dtype}"
    _check("combine_rows", ys, order, fits, wanted)
    refuse_tangents("combine_rows", ys, weights)
    y: Tensor = combine_rows_op(ys, order, weights)
    return y
