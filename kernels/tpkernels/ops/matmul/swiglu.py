"""A gated projection with SwiGLU or GeGLU in one matmul, forward and backward.

    y[T, 2F/tp] = x[T, D] @ weight[2F/tp, D].T                     (gate, up) side by side
    h[T, F/tp] = act(gate) * up                                    act = silu; the engine's also gelu, gelu_tanh

    dy[T, 2F/tp] = (dh * up * act'(gate), dh * act(gate))          as activation.py
    dx[T, D] = dy @ weight                                         partial(tp)
    dweight[2F/tp, D] = dy.T @ x

Columns of h are independent: a rank's rows of the weight need nothing of another rank's, as long as its gate and up are
the same columns of the whole.

The decision a reader will question: y is stored for backward, although forward does not need it. Without it backward
multiplies x and weight again, half as many operations as forward and backward otherwise need. `recompute` does that
where memory is scarcer than time.

Source: Shazeer, "GLU variants improve transformer", arXiv 2002.05202.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tpkernels.autocast import lowered
from tpkernels.derivatives import differentiable_once, refuse_tangents
from tpkernels.ops.activation import activation_backward_op, activation_forward, activation_reference
from tpkernels.ops.matmul.configs import MatmulConfig
from tpkernels.ops.matmul.host import product
from tpkernels.ops.matmul.operator import has_kernel, matmul_op
from tpkernels.ops.matmul.swiglu_kernel import launch_matmul_swiglu


def matmul_swiglu_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Return h computed in x's dtype: the specification."""
    return activation_reference(x @ weight.T, "silu", gated=True)


def matmul_gated_forward(
    x: Tensor, weight: Tensor, kind: str, keeps_y: bool, fixed: bool, config: MatmulConfig | None = None
) -> tuple[Tensor, Tensor]:
    """Return (h, y) as `matmul_swiglu_op`, of any activation, for callers inside a Function of their own.

    Args:
        kind: as activation.py.
        config: the tile that was tuned, or None for that of the sizes.

    Cost: of T rows 4*T*F*D flops; reads x and weight, T*D + 2*F*D elements, writes h, T*F, and y, 2*T*F, if it is kept.
    With the activation's kernel apart y is read once more: 2*T*F elements that this saves.
    """
    if has_kernel(x):
        return launch_matmul_swiglu(x, weight, keeps_y, kind=kind, fixed=fixed, config=config)
    y = product(x, weight.T)
    return activation_forward(y, kind, True), y if keeps_y else y.new_empty(0)


@torch.library.custom_op("tpkernels::matmul_swiglu", mutates_args=())
def matmul_swiglu_op(x: Tensor, weight: Tensor, keeps_y: bool, fixed: bool) -> tuple[Tensor, Tensor]:
    """Return (h, y), new and contiguous; y has no elements unless it is kept, and gets no gradient."""
    return matmul_gated_forward(x, weight, "silu", keeps_y, fixed)


@matmul_swiglu_op.register_fake
def _(x: Tensor, weight: Tensor, keeps_y: bool, fixed: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight.shape[0] // 2), x.new_empty((x.shape[0], weight.shape[0]) if keeps_y else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, keeps_y, ctx.fixed = inputs
    ctx.save_for_backward(x, weight, output[1] if keeps_y else None)
    ctx.set_materialize_grads(False)


@differentiable_once
def _backward(ctx: Any, dh: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    x, weight, y = ctx.saved_tensors
    if dh is None:
        return None, None, None, None
    if y is None:
        y = matmul_op(x, weight.t(), None, None, ctx.fixed)
    dy = activation_backward_op(dh, y, "silu", True)
    wants_dx, wants_dweight, *_ = ctx.needs_input_grad
    dx = matmul_op(dy, weight, None, None, ctx.fixed) if wants_dx else None
    dweight = matmul_op(dy.t(), x, None, None, ctx.fixed) if wants_dweight else None
    return dx, dweight, None, None


matmul_swiglu_op.register_autograd(_backward, setup_context=_setup_context)


def matmul_swiglu(x: Tensor, weight: Tensor, *, recompute: bool = False, fixed: bool = False) -> Tensor:
    """Project rows to gate and up, and multiply up by silu of gate.

        h[T, F] = silu(x @ w_gate.T) * (x @ w_up.T),  weight[2F, D] = (w_gate, w_up) one above the other
        dx[T, D] = dy @ weight;  dweight[2F, D] = dy.T @ x;  dy[T, 2F] = (dh * up * silu'(gate), dh * silu(gate))

    Args:
        x: [..., D], floating point, any strides.
        weight: [2F, D] of x's dtype, any strides.
        recompute: multiply again in backward instead of keeping y[T, 2F].
        fixed: as matmul.

    Returns:
        h [..., F] of x's dtype, new and contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Cost: 4*T*F*D flops; reads x and weight, writes h, and y if backward will need it. Backward 8*T*F*D flops, 12 with
    `recompute`.
    Numerics: as matmul; h is computed from gate and up in float32 before they are rounded, backward from rounded ones.
    Source: Shazeer, arXiv 2002.05202.
    """
    x, weight = lowered(x, weight)
    if not _fits(x, weight):
        raise ValueError(
            f"h[..., F] = silu(x @ w_gate.T) * (x @ w_up.T) needs x[..., D] and weight[2F, D] of one floating-point "
            f"dtype: x {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype}: lay gate's rows above "
            "up's, as many"
        )
    refuse_tangents("matmul_swiglu", x, weight)
    keeps_y = not recompute and torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    h: Tensor = matmul_swiglu_op(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), weight, keeps_y, fixed)[0]
    return h.view(*x.shape[:-1], len(weight) // 2)


def _fits(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dim() >= 1
        and x.is_floating_point()
        and weight.dtype == x.dtype
        and weight.dim() == 2
        and weight.shape[1] == x.shape[-1]
        and weight.shape[0] % 2 == 0
    )
