"""Gate, up and SwiGLU of all experts in one, forward and backward.

    y[R, 2F] = (x_r w_gate_e(r).T, x_r w_up_e(r).T)                (gate, up) side by side
    h[R, F] = silu(gate) * up

    dy[R, 2F] = (dh * up * silu'(gate), dh * silu(gate))           as activation.py
    dx[R, D] = dgate_r w_gate_e(r) + dup_r w_up_e(r)               one sum
    dw_gate[e] = dgate_e.T x_e;  dw_up[e] = dup_e.T x_e

Rows are sorted by expert as grouped.py says, and what it says of offsets holds here.

The decision a reader will question: gate and up lie side by side in one tensor, although their weights are two. So
backward is activation.py's kernel, which reads and writes such rows.

Source: Shazeer, "GLU variants improve transformer", arXiv 2002.05202; Gale et al., "MegaBlocks", arXiv 2211.15841.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.autocast import lowered
from tpkernels.derivatives import differentiable_once, refuse_tangents
from tpkernels.ops.activation import activation_backward, activation_reference
from tpkernels.ops.experts.grouped import (
    are_alike,
    grouped_matmul_forward,
    grouped_matmul_reference,
    shapes_of,
    weight_gradient,
)
from tpkernels.ops.experts.grouped_host import swiglu_by_expert
from tpkernels.ops.experts.grouped_swiglu_kernel import launch_grouped_swiglu
from tpkernels.ops.matmul.operator import has_kernel


def grouped_swiglu_reference(x: Tensor, w_gate: Tensor, w_up: Tensor, offsets: Tensor) -> Tensor:
    """Return h computed in x's dtype: the specification."""
    gate, up = (grouped_matmul_reference(x, w, offsets) for w in (w_gate, w_up))
    return activation_reference(torch.cat((gate, up), dim=1), "silu", gated=True)


def grouped_swiglu_forward(
    x: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    offsets: Tensor,
    keeps_y: bool,
    *,
    fixed: bool = False,
    usual_rows: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return (h, y) as `grouped_swiglu_op`, for callers inside a Function of their own.

    Args:
        keeps_y: whether backward will need y[R, 2F]; without, y has no elements.
        usual_rows: as grouped_matmul_forward.
    """
    if has_kernel(x):
        return launch_grouped_swiglu(x, w_gate, w_up, offsets, keeps_y, fixed=fixed, usual_rows=usual_rows)
    return swiglu_by_expert(x, w_gate, w_up, offsets, keeps_y, fixed)


def grouped_swiglu_backward(
    dh: Tensor,
    y: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    offsets: Tensor,
    *,
    needs_dx: bool = True,
    fixed: bool = False,
    usual_rows: int = 0,
) -> tuple[Tensor | None, Tensor]:
    """Return (dx[R, D], dy[R, 2F]) from dh[R, F] and the y that forward kept, without torch's dispatcher.

    The weights' gradients are `accumulate_grouped_wgrad` of dgate = dy[:, :F] and dup = dy[:, F:], with x.

    Args:
        needs_dx: without, dx is None.
        usual_rows: as grouped_matmul_forward.

    Cost: reads dh and y, writes dy; 4*R*F*D flops for dx.
    """
    dy = activation_backward(dh, y, "silu", True)
    if not needs_dx:
        return None, dy
    dgate, dup = dy.chunk(2, dim=1)
    also = dup, w_up
    dx = grouped_matmul_forward(dgate, w_gate, offsets, transposed=True, also=also, fixed=fixed, usual_rows=usual_rows)
    return dx, dy


@torch.library.custom_op("tpkernels::grouped_swiglu", mutates_args=())
def grouped_swiglu_op(
    x: Tensor, w_gate: Tensor, w_up: Tensor, offsets: Tensor, keeps_y: bool, fixed: bool
) -> tuple[Tensor, Tensor]:
    """Return (h, y), new and contiguous; y has no elements unless it is kept, and gets no gradient."""
    return grouped_swiglu_forward(x, w_gate, w_up, offsets, keeps_y, fixed=fixed)


@grouped_swiglu_op.register_fake
def _(x: Tensor, w_gate: Tensor, w_up: Tensor, offsets: Tensor, keeps_y: bool, fixed: bool) -> tuple[Tensor, Tensor]:
    rows, width = x.shape[0], w_gate.shape[1]
    return x.new_empty(rows, width), x.new_empty((rows, 2 * width) if keeps_y else 0)


@torch.library.custom_op("tpkernels::grouped_swiglu_backward", mutates_args=())
def grouped_swiglu_backward_op(
    dh: Tensor, y: Tensor, w_gate: Tensor, w_up: Tensor, offsets: Tensor, fixed: bool
) -> tuple[Tensor, Tensor]:
    """Return (dx, dy), new and contiguous."""
    dx, dy = grouped_swiglu_backward(dh, y, w_gate, w_up, offsets, fixed=fixed)
    assert dx is not None
    return dx, dy


@grouped_swiglu_backward_op.register_fake
def _(dh: Tensor, y: Tensor, w_gate: Tensor, w_up: Tensor, offsets: Tensor, fixed: bool) -> tuple[Tensor, Tensor]:
    return dh.new_empty(dh.shape[0], w_gate.shape[2]), y.new_empty(y.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w_gate, w_up, offsets, _, ctx.fixed = inputs
    ctx.save_for_backward(x, w_gate, w_up, offsets, output[1])
    ctx.set_materialize_grads(False)


@differentiable_once
def _backward(ctx: Any, dh: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    x, w_gate, w_up, offsets, y = ctx.saved_tensors
    if dh is None:
        return (None,) * 6
    dx, dy = grouped_swiglu_backward_op(dh, y, w_gate, w_up, offsets, ctx.fixed)
    halves = dy.chunk(2, dim=1)
    dws = [
        weight_gradient(half, x, offsets, ctx.fixed) if wanted else None
        for half, wanted in zip(halves, ctx.needs_input_grad[1:3], strict=True)
    ]
    return dx if ctx.needs_input_grad[0] else None, *dws, None, None, None


grouped_swiglu_op.register_autograd(_backward, setup_context=_setup_context)


def grouped_swiglu(x: Tensor, w_gate: Tensor, w_up: Tensor, offsets: Tensor, *, fixed: bool = False) -> Tensor:
    """Project rows that are sorted by expert to gate and up of their expert, and multiply up by silu of gate.

        h[R, F] = silu(x_r w_gate_e(r).T) * (x_r w_up_e(r).T),  x[R, D], w_gate and w_up [E, F, D]
        dx_r = dgate_r w_gate_e(r) + dup_r w_up_e(r);  dw_gate[e] = dgate_e.T x_e;  dw_up[e] = dup_e.T x_e

    Args:
        x, offsets, fixed: as grouped_matmul.
        w_gate, w_up: of x's dtype.

    Returns:
        h [R, F] of x's dtype, new and contiguous; rows beyond offsets[E] are zeros.

    Raises:
        ValueError: as grouped_matmul.

    Cost: 4*R*F*D flops; reads x and the weights of experts with rows, writes h, and gate and up, 2*R*F elements, if
        backward will need them. Backward 8*R*F*D flops.
    Numerics: as matmul_swiglu: on a GPU h is computed from gate and up in float32 before they are rounded, backward
        from rounded ones; on a CPU h too.
    Source: Shazeer, arXiv 2002.05202.
    """
    x, w_gate, w_up = lowered(x, w_gate, w_up)
    fits = x.dim() == 2 and w_gate.dim() == 3 and w_gate.shape == w_up.shape and w_gate.shape[2] == x.shape[1]
    if not fits or not are_alike(offsets, len(w_gate), x, w_gate, w_up):
        raise ValueError(
            f"h[R, F] = silu(x_r w_gate_e(r).T) * (x_r w_up_e(r).T) needs x[R, D], w_gate and w_up [E, F, D] of one "
            f"floating-point dtype, offsets int32 [E + 1]: {shapes_of(x, w_gate, w_up, offsets)}: take offsets of "
            "sort_by_expert"
        )
    refuse_tangents("grouped_swiglu", x, w_gate, w_up)
    keeps_y = torch.is_grad_enabled() and any(t.requires_grad for t in (x, w_gate, w_up))
    h: Tensor = grouped_swiglu_op(x, w_gate, w_up, offsets, keeps_y, fixed)[0]
    return h
