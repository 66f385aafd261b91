"""SwiGLU, GEGLU and GELU, forward and backward.

    h[T, F/tp] = act(gate) * up         y[T, 2F/tp] = (gate, up) side by side, as one projection makes them
    h[T, F/tp] = act(y)                 y[T, F/tp], not gated

    dgate = dh * up * act'(gate);  dup = dh * act(gate)         dy[T, 2F/tp] = (dgate, dup) side by side
    act = silu (SwiGLU), gelu, or gelu by tanh (GEGLU, GELU)

Elements are independent: a rank's columns need nothing of another rank's, as long as its gate and up are the same
columns of the whole. Forward reads y and writes h; backward reads y and dh and writes dy, in one kernel.

The decision a reader will question: only y is kept, and backward recomputes act and its slope from it, although keeping
act(gate) would save an exponential. The kernels are bound by memory, so keeping more costs more than recomputing.

Source: Shazeer, "GLU variants improve transformer", arXiv 2002.05202; Hendrycks and Gimpel, "Gaussian error linear
units (GELUs)", arXiv 1606.08415.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels.derivatives import differentiable_once, refuse_tangents
from tpkernels.launch import accumulation_dtype, by_triton, cdiv, jit, power_of_2, run, tl, widened

# Keys are the values of `approximate` of torch's gelu.
_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}


def activation_reference(y: Tensor, kind: str, gated: bool) -> Tensor:
    """Return h computed in y's dtype: the specification. kind is silu, gelu or gelu_tanh."""
    gate, up = y.chunk(2, dim=-1) if gated else (y, None)
    activated = F.silu(gate) if kind == "silu" else F.gelu(gate, approximate=_approximate(kind))
    return activated if up is None else activated * up


@jit
def activated(b: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Return act(b) of a block in float32 or float64; KIND is silu, gelu or gelu_tanh.

    A matmul's epilogue calls it too. It is right for every finite b: far above 0 it gives b, far below 0 it gives -0.
    """
    return b * _share(b, KIND)[0]


@jit
def activation_slope(b: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Return act'(b), with the arguments of `activated`; where both are called, their common part is computed once."""
    share, change = _share(b, KIND)
    slope = b * change
    if KIND == "gelu_tanh":
        # Multiply in this order: where slope is 0 the product stays 0, however large b is. b * b alone may be infinite,
        # and 0 * infinity is NaN.
        slope = 1.5957691216057308 * (slope + 0.134145 * slope * b * b)
    return share + slope


@jit
def _share(b: tl.tensor, KIND: tl.constexpr) -> Any:
    """Return (act(b) / b, which is from 0 to 1, and its derivative by b; for gelu_tanh by the sigmoid's argument)."""
    if KIND == "gelu":
        share = 0.5 * (1 + tl.erf(0.7071067811865476 * b))
        change = 0.3989422804014327 * tl.exp(-0.5 * b * b)  # 1 / sqrt(2 pi)
    else:
        argument = b
        if KIND == "gelu_tanh":
            # (1 + tanh(a)) / 2 is the sigmoid of 2a; 2a = 2 sqrt(2 / pi) (b + 0.044715 b^3).
            argument = 1.5957691216057308 * (b + 0.044715 * b * b * b)
        else:
            tl.static_assert(KIND == "silu", "KIND is silu, gelu or gelu_tanh")
        # exp of -|argument| cannot overflow. The derivative is e * r * r: share * (1 - share) would lose most digits
        # where it is small.
        e = tl.exp(-tl.abs(argument))
        r = 1 / (1 + e)
        share = tl.where(argument < 0, e * r, r)
        change = e * r * r
    return share, change


@jit(do_not_specialize=["num_rows"])
def _activation_kernel(
    p_y: tl.tensor,
    p_h: tl.tensor,
    num_rows: tl.int64,
    num_columns: tl.int32,
    stride_y: tl.int64,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Compute BLOCK_ROWS rows of BLOCK_COLUMNS columns of h per program; consecutive programs are adjacent in a row."""
    num_blocks = tl.cdiv(num_columns, BLOCK_COLUMNS)
    i_program = tl.program_id(0)
    o_row = (i_program // num_blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_column = i_program % num_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    m_inside = (o_row < num_rows)[:, None] & (o_column < num_columns)[None, :]
    o_y = o_row[:, None] * stride_y + o_column[None, :]
    # [BLOCK_ROWS, BLOCK_COLUMNS]
    b_gate = widened(tl.load(p_y + o_y, mask=m_inside, other=0.0))
    b_h = activated(b_gate, KIND)
    if GATED:
        # [BLOCK_ROWS, BLOCK_COLUMNS]
        b_h *= widened(tl.load(p_y + num_columns + o_y, mask=m_inside, other=0.0))
    o_h = o_row[:, None] * num_columns + o_column[None, :]
    tl.store(p_h + o_h, b_h.to(p_h.dtype.element_ty), mask=m_inside)


@jit(do_not_specialize=["num_rows"])
def _activation_backward_kernel(
    p_dh: tl.tensor,
    p_y: tl.tensor,
    p_dy: tl.tensor,
    num_rows: tl.int64,
    num_columns: tl.int32,
    stride_dh: tl.int64,
    stride_y: tl.int64,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    """Compute a block of dy per program, cut as in _activation_kernel: the same columns of dgate and of dup."""
    num_blocks = tl.cdiv(num_columns, BLOCK_COLUMNS)
    i_program = tl.program_id(0)
    o_row = (i_program // num_blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_column = i_program % num_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    m_inside = (o_row < num_rows)[:, None] & (o_column < num_columns)[None, :]
    o_y = o_row[:, None] * stride_y + o_column[None, :]
    # [BLOCK_ROWS, BLOCK_COLUMNS]
    b_dh = widened(tl.load(p_dh + o_row[:, None] * stride_dh + o_column[None, :], mask=m_inside, other=0.0))
    # [BLOCK_ROWS, BLOCK_COLUMNS]
    b_gate = widened(tl.load(p_y + o_y, mask=m_inside, other=0.0))
    b_dgate = b_dh * activation_slope(b_gate, KIND)
    p_dgate = p_dy + o_row[:, None] * num_columns + o_column[None, :]
    if GATED:
        # [BLOCK_ROWS, BLOCK_COLUMNS]
        b_dgate *= widened(tl.load(p_y + num_columns + o_y, mask=m_inside, other=0.0))
        b_dup = b_dh * activated(b_gate, KIND)
        p_dgate += o_row[:, None] * num_columns
        tl.store(p_dgate + num_columns, b_dup.to(p_dy.dtype.element_ty), mask=m_inside)
    tl.store(p_dgate, b_dgate.to(p_dy.dtype.element_ty), mask=m_inside)


def _block(num_columns: int) -> dict[str, int]:
    """Return the block: 1024 elements, 8 per thread: 16 bytes of bfloat16. Not tuned on a GPU yet.

    Ranks' columns are multiples of 256.
    """
    columns = min(256, power_of_2(num_columns))
    return {"BLOCK_ROWS": min(64, 1024 // columns), "BLOCK_COLUMNS": columns, "num_warps": 4}


def launch_activation(y: Tensor, kind: str, gated: bool) -> Tensor:
    """Run the operator tpkernels::activation with its kernel."""
    y = y if y.stride(1) == 1 else y.contiguous()
    num_rows, num_columns = y.shape[0], y.shape[1] // (1 + gated)
    h = torch.empty(num_rows, num_columns, dtype=y.dtype, device=y.device)
    block = _block(num_columns)
    run(
        _activation_kernel,
        (cdiv(num_rows, block["BLOCK_ROWS"]) * cdiv(num_columns, block["BLOCK_COLUMNS"]),),
        y,
        h,
        num_rows,
        num_columns,
        y.stride(0),
        KIND=kind,
        GATED=gated,
        **block,
    )
    return h


def launch_activation_backward(dh: Tensor, y: Tensor, kind: str, gated: bool) -> Tensor:
    """Run the operator tpkernels::activation_backward with its kernel."""
    dh, y = (t if t.stride(1) == 1 else t.contiguous() for t in (dh, y))
    num_rows, num_columns = dh.shape
    dy = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    block = _block(num_columns)
    run(
        _activation_backward_kernel,
        (cdiv(num_rows, block["BLOCK_ROWS"]) * cdiv(num_columns, block["BLOCK_COLUMNS"]),),
        dh,
        y,
        dy,
        num_rows,
        num_columns,
        dh.stride(0),
        y.stride(0),
        KIND=kind,
        GATED=gated,
        **block,
    )
    return dy


def _approximate(kind: str) -> str:
    return "tanh" if kind == "gelu_tanh" else "none"


def _on_host(y: Tensor, kind: str, gated: bool) -> Tensor:
    gate, *up = _wide(y).chunk(1 + gated, dim=1)
    h = _activated_on_host(gate, kind)
    return (h.mul_(up[0]) if up else h).to(y.dtype)


def _backward_on_host(dh: Tensor, y: Tensor, kind: str, gated: bool) -> Tensor:
    wide_dh, wide = _wide(dh), _wide(y)
    dy = wide.new_empty(y.shape)
    gate, *up = wide.chunk(1 + gated, dim=1)
    dgate, *dup = dy.chunk(1 + gated, dim=1)
    if up:
        torch.mul(wide_dh, _activated_on_host(gate, kind), out=dup[0])
        wide_dh = wide_dh * up[0]
    if kind == "silu":
        torch.ops.aten.silu_backward(wide_dh, gate, grad_input=dgate)
    else:
        torch.ops.aten.gelu_backward(wide_dh, gate, approximate=_approximate(kind), grad_input=dgate)
    return dy.to(y.dtype)


def _wide(y: Tensor) -> Tensor:
    """Return y in the dtype to compute in, contiguous: torch's exp rounds vectors and single elements differently."""
    return y.to(accumulation_dtype(y.dtype)).contiguous()


def _activated_on_host(gate: Tensor, kind: str) -> Tensor:
    return F.silu(gate) if kind == "silu" else F.gelu(gate, approximate=_approximate(kind))


def activation_forward(y: Tensor, kind: str, gated: bool) -> Tensor:
    """Run `activation_op` without torch's dispatcher, for callers inside a Function of their own."""
    return (launch_activation if by_triton(y) else _on_host)(y, kind, gated)


def activation_backward(dh: Tensor, y: Tensor, kind: str, gated: bool) -> Tensor:
    """Run `activation_backward_op` without torch's dispatcher."""
    return (launch_activation_backward if by_triton(y) else _backward_on_host)(dh, y, kind, gated)


@torch.library.custom_op("tpkernels::activation", mutates_args=())
def activation_op(y: Tensor, kind: str, gated: bool) -> Tensor:
    """Return h[T, F], new and contiguous, from y[T, 2F] if gated, else y[T, F]; kind is silu, gelu or gelu_tanh."""
    return activation_forward(y, kind, gated)


@activation_op.register_fake
def _(y: Tensor, kind: str, gated: bool) -> Tensor:
    return y.new_empty(y.shape[0], y.shape[1] // (1 + gated))


@torch.library.custom_op("tpkernels::activation_backward", mutates_args=())
def activation_backward_op(dh: Tensor, y: Tensor, kind: str, gated: bool) -> Tensor:
    """Return dy in y's shape, new and contiguous, from dh[T, F] and the arguments of `activation_op`."""
    return activation_backward(dh, y, kind, gated)


@activation_backward_op.register_fake
def _(dh: Tensor, y: Tensor, kind: str, gated: bool) -> Tensor:
    return y.new_empty(y.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, ctx.kind, ctx.gated = inputs
    ctx.save_for_backward(y)


@differentiable_once
def _backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
    return activation_backward_op(dh, *ctx.saved_tensors, ctx.kind, ctx.gated), None, None


activation_op.register_autograd(_backward, setup_context=_setup_context)


def _applied(y: Tensor, kind: str, gated: bool) -> Tensor:
    num_columns = y.shape[-1] if y.dim() else 0
    if not y.is_floating_point() or not num_columns or (gated and num_columns % 2):
        raise ValueError(
            f"{'a gated activation takes y[..., 2F]' if gated else 'an activation takes y[..., F]'} of floating-point "
            f"numbers, F at least 1: y is {tuple(y.shape)} {y.dtype}: "
            f"{'lay gate and up side by side' if gated else 'reshape or convert it'}"
        )
    refuse_tangents(kind, y)
    h: Tensor = activation_op(y.reshape(-1, num_columns), kind, gated)
    return h.view(*y.shape[:-1], h.shape[-1])


def _gelu_kind(approximate: str) -> str:
    if approximate not in _GELUS:
        raise ValueError(f"gelu's approximate is one of {', '.join(_GELUS)}: got {approximate}: pass one of these")
    return _GELUS[approximate]


def swiglu(y: Tensor) -> Tensor:
    """Multiply the second half of each row by silu of the first.

        h[T, F] = silu(gate) * up,  (gate, up) = y[T, 2F],  silu(g) = g * sigmoid(g)
        dgate = dh * up * s * (1 + g * (1 - s)),  s = sigmoid(g);   dup = dh * silu(g)

    Args:
        y: [..., 2F], floating point, any strides.

    Returns:
        h [..., F] of y's dtype, new and contiguous.

    Raises:
        ValueError: y is of integers, or its last dim is odd or 0.

    Cost: forward reads y and writes h; backward reads y and dh, writes dy; keeps y alone. On a CPU a few passes in
    float32.
    Numerics: computed in float32, or float64 for float64, and rounded once; deterministic. Large gates cause neither
    overflow nor NaN; infinities give what torch's silu gives.
    Source: Shazeer, arXiv 2002.05202.
    """
    return _applied(y, "silu", True)


def geglu(y: Tensor, approximate: str = "none") -> Tensor:
    """Multiply the second half of each row by gelu of the first.

        h[T, F] = gelu(gate) * up,  (gate, up) = y[T, 2F]

    Args:
        y: as swiglu.
        approximate: as gelu.

    Returns, Raises, Cost, Numerics, Source: as swiglu; ValueError for another `approximate`, too.
    """
    return _applied(y, _gelu_kind(approximate), True)


def gelu(y: Tensor, approximate: str = "none") -> Tensor:
    """Multiply each element by the cumulative normal distribution at it.

        h = y * (1 + erf(y / sqrt(2))) / 2                                     "none"
        h = y * (1 + tanh(sqrt(2 / pi) * (y + 0.044715 * y^3))) / 2            "tanh"

    Args:
        y: [..., F], floating point, any strides.
        approximate: "none" or "tanh", as torch's gelu; GPT-2's is tanh.

    Returns:
        h of y's shape and dtype, new and contiguous.

    Raises:
        ValueError: y is of integers, its last dim is 0, or another `approximate`.

    Cost, Numerics: as swiglu.
    Source: Hendrycks and Gimpel, arXiv 1606.08415.
    """
    return _applied(y, _gelu_kind(approximate), False)
