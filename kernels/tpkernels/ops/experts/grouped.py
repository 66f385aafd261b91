"""Products of rows that are sorted by expert: each expert multiplies its rows by its own weight.

    y[R, F] = x_r w_e(r).T          x[R, D], w[E, F, D]; rows offsets[e] to offsets[e + 1] are expert e's
    dx[R, D] = dy_r w_e(r)          the same, transposed
    dw[e] += dy_e.T x_e             x_e, dy_e: the rows of expert e

offsets[E + 1] (order.py) lie where x lies. A GPU's programs read them: grids go by upper bounds, and the host waits for
nothing. R may be larger than offsets[E], as buffers of a fixed size are: nothing is read from rows beyond it, and
results have zeros there. An expert without rows costs nothing, and its gradient is left as it is. grouped_swiglu.py is
an expert's gate and up in one.

The decision a reader will question: an expert's rows are not padded to a tile's. So an expert's last tile is not full,
but nothing is copied and no row's place depends on a tile's size.

Source: Gale et al., "MegaBlocks", arXiv 2211.15841 (products of experts without capacity).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from tpkernels.autocast import lowered
from tpkernels.derivatives import differentiable_once, refuse_tangents
from tpkernels.ops.experts.grouped_choice import is_torchs, multiply_by_torch
from tpkernels.ops.experts.grouped_host import accumulate_by_expert, multiply_by_expert
from tpkernels.ops.experts.grouped_kernel import launch_grouped_matmul, launch_grouped_wgrad
from tpkernels.ops.matmul.operator import has_kernel


def grouped_matmul_reference(x: Tensor, w: Tensor, offsets: Tensor, *, transposed: bool = False) -> Tensor:
    """Return y computed in x's dtype: the specification."""
    starts = offsets.tolist()
    rows = [x[start:end] for start, end in itertools.pairwise(starts)]
    parts = [x_e @ (w_e if transposed else w_e.T) for x_e, w_e in zip(rows, w, strict=True)]
    rest = x.new_zeros(len(x) - starts[-1], w.shape[2] if transposed else w.shape[1])
    return torch.cat([*parts, rest])


def grouped_wgrad_reference(buffer: Tensor, dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Return buffer[e] + dy_e.T @ x_e, a new tensor, the products in dy's dtype: the specification."""
    starts = offsets.tolist()
    products = [dy[start:end].T @ x[start:end] for start, end in itertools.pairwise(starts)]
    return buffer + torch.stack(products)


def grouped_matmul_forward(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    *,
    transposed: bool = False,
    also: tuple[Tensor, Tensor] | None = None,
    fixed: bool = False,
    usual_rows: int = 0,
) -> Tensor:
    """Run `grouped_matmul` without its checks and torch's dispatcher, for callers inside a Function of their own.

    Args:
        also: another x and w, of the same shapes, whose product is added before anything is rounded on a GPU:
            y_r = x_r w_e(r) + x'_r w'_e(r), as dx of gate and up is.
        usual_rows: how many rows experts have together as a rule, where x's differ from call to call or are more than
            that: a GPU's tiles are chosen by it. 0 for those of x.
    """
    if also is None and is_torchs(x, w, fixed):
        return multiply_by_torch(x, w, offsets, transposed)
    if has_kernel(x):
        return launch_grouped_matmul(
            x, w, offsets, transposed=transposed, also=also, fixed=fixed, usual_rows=usual_rows
        )
    return multiply_by_expert([(x, w)] if also is None else [(x, w), also], offsets, transposed, fixed)


def accumulate_grouped_wgrad(
    buffer: Tensor, dy: Tensor, x: Tensor, offsets: Tensor, *, fixed: bool = False, usual_rows: int = 0
) -> None:
    """Run `grouped_wgrad_` without its checks and torch's dispatcher, for callers inside a Function of their own.

    Args:
        usual_rows: as grouped_matmul_forward.
    """
    if has_kernel(x):
        launch_grouped_wgrad(buffer, dy, x, offsets, fixed=fixed, usual_rows=usual_rows)
    else:
        accumulate_by_expert(buffer, dy, x, offsets, fixed)


@torch.library.custom_op("tpkernels::grouped_matmul", mutates_args=())
def grouped_matmul_op(x: Tensor, w: Tensor, offsets: Tensor, transposed: bool, fixed: bool) -> Tensor:
    """Return y[R, N], new and contiguous."""
    return grouped_matmul_forward(x, w, offsets, transposed=transposed, fixed=fixed)


@grouped_matmul_op.register_fake
def _(x: Tensor, w: Tensor, offsets: Tensor, transposed: bool, fixed: bool) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2] if transposed else w.shape[1])


@torch.library.custom_op("tpkernels::grouped_wgrad_", mutates_args=("buffer",))
def grouped_wgrad_op(buffer: Tensor, dy: Tensor, x: Tensor, offsets: Tensor, fixed: bool) -> None:
    """Add dy_e.T @ x_e to buffer[e]."""
    accumulate_grouped_wgrad(buffer, dy, x, offsets, fixed=fixed)


@grouped_wgrad_op.register_fake
def _(buffer: Tensor, dy: Tensor, x: Tensor, offsets: Tensor, fixed: bool) -> None:
    return None


def weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor, fixed: bool) -> Tensor:
    """Return dw[E, F, D] = dy_e.T @ x_e, new, zeros where an expert has no rows, through the registered operator."""
    dw = dy.new_zeros(len(offsets) - 1, dy.shape[1], x.shape[1])
    grouped_wgrad_op(dw, dy, x, offsets, fixed)
    return dw


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, offsets, ctx.transposed, ctx.fixed = inputs
    # Each gradient needs the other operand only.
    kept = x if ctx.needs_input_grad[1] else None, w if ctx.needs_input_grad[0] else None
    ctx.save_for_backward(*kept, offsets)


@differentiable_once
def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w, offsets = ctx.saved_tensors
    dx = None if w is None else grouped_matmul_op(dy, w, offsets, not ctx.transposed, ctx.fixed)
    dw = None
    if x is not None:
        left, right = (x, dy) if ctx.transposed else (dy, x)
        dw = weight_gradient(left, right, offsets, ctx.fixed)
    return dx, dw, None, None, None


grouped_matmul_op.register_autograd(_backward, setup_context=_setup_context)


def grouped_matmul(x: Tensor, w: Tensor, offsets: Tensor, *, transposed: bool = False, fixed: bool = False) -> Tensor:
    """Multiply rows that are sorted by expert, each by its expert's weight.

        y[R, F] = x_r w_e(r).T,  x[R, D], w[E, F, D];   transposed: y[R, D] = x_r w_e(r),  x[R, F]
        dx = the other of the two, of dy;   dw[e] = dy_e.T x_e, or x_e.T dy_e if transposed

    Args:
        x: rows, those of expert e from offsets[e] to offsets[e + 1]; floating point. What lies in rows beyond
            offsets[E] is not read.
        w: of x's dtype.
        offsets: int32 [E + 1], rising from 0 to at most R, on x's device.
        transposed: multiply by w_e instead of its transpose.
        fixed: the bits of an expert's products depend on its own rows and weight alone, not on where they lie. On a GPU
            one configuration serves all sizes; on a CPU what does not begin at a cache line is copied.

    Returns:
        y of x's dtype, new and contiguous; rows beyond offsets[E] are zeros.

    Raises:
        ValueError: shapes or dtypes that do not fit; on a CPU also offsets that fall or end beyond R, which a GPU,
            which waits for nothing, does not see.

    Cost: 2*R*F*D flops; reads x and the weights of experts with rows, writes y. Keeps x and w for backward, which costs
        twice that. No memory beside y. On a GPU float64 is torch's, and the host waits for the offsets.
    Numerics: as matmul. On CUDA torch's grouped_mm may compute it (grouped_choice.py), never where torch is to be
        deterministic, nor with `fixed`.
    Source: Gale et al., arXiv 2211.15841.
    """
    x, w = lowered(x, w)
    fits = x.dim() == 2 and w.dim() == 3 and x.shape[1] == w.shape[1 if transposed else 2]
    if not fits or not are_alike(offsets, len(w), x, w):
        product = "y[R, D] = x_r w_e(r) needs x[R, F]" if transposed else "y[R, F] = x_r w_e(r).T needs x[R, D]"
        raise ValueError(
            f"{product}, w[E, F, D] of one floating-point dtype, offsets int32 [E + 1]: {shapes_of(x, w, offsets)}: "
            "take offsets of sort_by_expert"
        )
    refuse_tangents("grouped_matmul", x, w)
    y: Tensor = grouped_matmul_op(x, w, offsets, transposed, fixed)
    return y


def grouped_wgrad_(buffer: Tensor, dy: Tensor, x: Tensor, offsets: Tensor, *, fixed: bool = False) -> Tensor:
    """Accumulate the gradients of all experts' weights in place.

        dw[e] += dy_e.T x_e,  dy_e and x_e: rows offsets[e] to offsets[e + 1]

    Args:
        buffer: dw [E, F, D] in x's dtype or a wider one. Those of experts without rows stay as they are.
        dy, x: [R, F] and [R, D] of one dtype, sorted by expert. Rows beyond offsets[E] are not read.
        offsets, fixed: as grouped_matmul.

    Returns:
        `buffer`.

    Raises:
        ValueError: as grouped_matmul, or a buffer of a narrower dtype.

    Cost: 2*R*F*D flops; reads dy and x, reads and writes dw of experts with rows. On a CPU with a wider buffer also one
        expert's product in x's dtype.
    Numerics: as wgrad_; deterministic: an expert's sum goes over its rows in their order, in one program, without
        atomics.
    """
    fits = dy.dim() == x.dim() == 2 and buffer.dim() == 3 and buffer.shape[1:] == (dy.shape[1], x.shape[1])
    is_wider = buffer.dtype.is_floating_point and buffer.dtype.itemsize > x.dtype.itemsize
    holds_sum = buffer.device == x.device and (is_wider or buffer.dtype == x.dtype)
    if not fits or len(dy) != len(x) or not holds_sum or not are_alike(offsets, len(buffer), dy, x):
        raise ValueError(
            "dw[e] += dy_e.T x_e needs dw[E, F, D], dy[R, F] and x[R, D] of one dtype or a wider dw, offsets int32 "
            f"[E + 1]: {shapes_of(buffer, dy, x, offsets)}: pass dy, x and offsets of one call"
        )
    grouped_wgrad_op(buffer, dy, x, offsets, fixed)
    return buffer


def shapes_of(*tensors: Tensor) -> str:
    """Return the tensors' shapes and dtypes, for a message."""
    return ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)


def are_alike(offsets: Tensor, num_experts: int, *operands: Tensor) -> bool:
    """Return whether operands have one floating-point dtype, and one device, where offsets of so many experts lie."""
    x = operands[0]
    return (
        x.is_floating_point()
        and all(t.dtype == x.dtype and t.device == x.device for t in operands)
        and offsets.device == x.device
        and offsets.dtype == torch.int32
        and offsets.shape == (num_experts + 1,)
    )
