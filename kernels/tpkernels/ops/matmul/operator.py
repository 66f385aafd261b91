"""Matrix products, forward and backward.

    c[M, N] = a[M, K] @ b[K, N] + bias[N] + residual[M, N]

    da[M, K] = dc @ b.T                                            dgrad, by the same kernel
    db[K, N] = a.T @ dc                                            wgrad, by the same kernel
    dbias[N] = sum of dc over rows;  dresidual = dc

Operands are read in place, whichever of their dims has no gaps: for y = x @ w.T, w is a torch weight [N, K] as it is
stored, and neither gradient transposes anything in memory. To accumulate a weight gradient, call
tpkernels.ops.matmul.wgrad. swiglu.py is SwiGLU of a product; tpkernels.fused multiplies sharded operands.

The decision a reader will question: on a GPU this uses its own kernel, not cuBLAS. The kernels that overlap
communication are this one with waits in it; and `fixed` promises bits, which no library does.

Source: triton's tutorials 3 and 9 (grouped order, persistent programs).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.autocast import lowered
from tpkernels.derivatives import refuse_tangents
from tpkernels.launch import by_triton
from tpkernels.ops.matmul.host import product
from tpkernels.ops.matmul.kernel import KERNEL_DTYPES, launch_matmul


def matmul_reference(a: Tensor, b: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Return c computed in a's dtype: the specification."""
    c = a @ b
    c = c if bias is None else c + bias
    return c if residual is None else c + residual


def _on_host(a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    c = product(a, b)
    if bias is not None:
        c += bias
    if residual is not None:
        c += residual
    return c


def has_kernel(x: Tensor) -> bool:
    """Return whether products of x use the Triton kernel: by_triton, and in one of KERNEL_DTYPES."""
    return by_triton(x) and x.dtype in KERNEL_DTYPES


def matmul_forward(a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, fixed: bool) -> Tensor:
    """Run `matmul_op` without torch's dispatcher, for callers inside a Function of their own."""
    if has_kernel(a):
        return launch_matmul(a, b, bias=bias, residual=residual, fixed=fixed)
    return _on_host(a, b, bias, residual)


@torch.library.custom_op("tpkernels::matmul", mutates_args=())
def matmul_op(a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, fixed: bool) -> Tensor:
    """Return c[M, N], new and contiguous."""
    return matmul_forward(a, b, bias, residual, fixed)


@matmul_op.register_fake
def _(a: Tensor, b: Tensor, bias: Any, residual: Any, fixed: bool) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, _, _, ctx.fixed = inputs
    # Each gradient needs the other operand only.
    ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None)


def _backward(ctx: Any, dc: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    _, _, wants_dbias, wants_dresidual, _ = ctx.needs_input_grad
    da = None if b is None else matmul_op(dc, b.t(), None, None, ctx.fixed)
    db = None if a is None else matmul_op(a.t(), dc, None, None, ctx.fixed)
    return da, db, dc.sum(0) if wants_dbias else None, dc if wants_dresidual else None, None


matmul_op.register_autograd(_backward, setup_context=_setup_context)


def matmul(
    a: Tensor, b: Tensor, *, bias: Tensor | None = None, residual: Tensor | None = None, fixed: bool = False
) -> Tensor:
    """Return the product of two matrices, plus a bias and a residual if given.

        c[M, N] = a[M, K] @ b[K, N] + bias[N] + residual[M, N]
        da = dc @ b.T;  db = a.T @ dc;  dbias = sum of dc over rows;  dresidual = dc

    Args:
        a: [M, K], floating point, any strides.
        b: [K, N] of a's dtype, any strides: pass `weight.T` of a torch weight.
        bias: [N] of a's dtype.
        residual: [M, N] of a's dtype, any strides.
        fixed: on a GPU, use one configuration for all sizes: an element's bits then depend on its row of a, its column
            of b and K only, not on what else is multiplied with them. Slower for most sizes. On a CPU torch's library
            decides, with or without it.

    Returns:
        c of a's dtype, new and contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Cost: 2*M*N*K flops; reads a, b, bias and residual and writes c, in one pass; backward twice that. Keeps a and b for
    backward. An operand with gaps in both dims is copied first.
    Numerics: summed in float32 in one order, everything added to the sum before it is rounded once; deterministic.
    float32 operands are not reduced to tf32. On a CPU, and in float64, the product is torch's, and the additions are to
    its rounded elements. K = 0 gives zeros, plus what is added. Under autocast all operands are converted to its dtype.
    """
    a, b, bias, residual = lowered(a, b, bias, residual)
    if not _fits(a, b, bias, residual):
        given = {"a": a, "b": b, "bias": bias, "residual": residual}
        found = ", ".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in given.items() if t is not None)
        raise ValueError(
            f"c[M, N] = a[M, K] @ b[K, N] + bias[N] + residual[M, N] needs these shapes and one floating-point dtype: "
            f"{found}: reshape or convert them; of a torch weight [N, K] pass weight.T"
        )
    refuse_tangents("matmul", a, b, bias, residual)
    c: Tensor = matmul_op(a, b, bias, residual, fixed)
    return c


def _fits(a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None) -> bool:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or not a.is_floating_point():
        return False
    shapes = ((b, b.shape), (bias, b.shape[1:]), (residual, (a.shape[0], b.shape[1])))
    return all(t is None or (t.shape == shape and t.dtype == a.dtype) for t, shape in shapes)
