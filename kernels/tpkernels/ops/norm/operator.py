"""RMSNorm and LayerNorm, forward and backward, with the residual addition before them.

    total[T, D] = x + residual                                     (add_*, else total = x)
    y[T, D] = (total - mean) * rstd * w + b                        mean = 0 and b = 0 for RMSNorm
    rstd[T] = (mean of (total - mean)^2 over the row + eps)^(-1/2)

    h = (total - mean) * rstd;   g = dy * w
    dtotal[T, D] += rstd * (g - mean of g - h * mean of g*h)       without `mean of g` for RMSNorm
    dw[D] = sum over tokens of dy * h;   db[D] = sum over tokens of dy

Rows are tokens: on a sequence-sharded x[T/tp, D] the weight gradients are partial(tp), and nothing else changes.

Forward reads each row once. Backward reads total and dy once, and with a residual the gradient that reaches total from
its other use; it writes dtotal, and adds dw of several rows in registers, one partial row per program; a second kernel
adds the partial rows. Rows of more than 8192 columns (4096 with a bias) are read once per block of that many columns,
all but the first time from the cache. The number of rows per program depends on the number of tokens only, not on the
GPU's processors, so the order of the sums does too; with chunks it depends on the size of a chunk only, which exact
mode needs.

Bytes of backward for T rows of e bytes an element: the least is 3*e*T*D, 4*e*T*D with the other gradient
(work.norm_backward_work). Besides, the weight is read once per program, and partial rows are written and read: 8*D
each, one for 32 rows at T = 8,192: 4 % of the least in 16 bits, mostly in a GPU's cache.

Source: Zhang and Sennrich, "Root mean square layer normalization", NeurIPS 2019; Ba, Kiros, Hinton, "Layer
normalization", arXiv 1607.06450.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels.autocast import promoted
from tpkernels.derivatives import differentiable_once, refuse_tangents
from tpkernels.launch import accumulation_dtype, by_triton, cdiv
from tpkernels.ops.norm.kernel import empty_outputs, launch_norm, launch_norm_backward

# Rows with more columns leave too few registers per thread.
_MOST_COLUMNS = 16384


def norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor]:
    """Return (y, total) computed in x's dtype: the specification."""
    total = x if residual is None else x + residual
    if centered:
        return F.layer_norm(total, total.shape[-1:], weight, bias, eps), total
    return F.rms_norm(total, total.shape[-1:], weight, eps), total


def _on_host(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    centered: bool,
    num_chunks: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(x.dtype)
    total = x.new_empty(0) if residual is None else x + residual
    of = x if residual is None else total
    if centered:
        wide_bias = None if bias is None else bias.to(dtype)
        y, mean, rstd = torch.native_layer_norm(of.to(dtype), weight.shape, weight.to(dtype), wide_bias, eps)
        return y.to(x.dtype), total, mean.flatten(), rstd.flatten()
    y, _, mean, rstd = empty_outputs(x, None, False)
    if num_chunks == 1 and len(x) <= _host_rows(x):
        _scale_rows(of, weight, eps, y, rstd)
        return y, total, mean, rstd
    for rows in _host_blocks(x, num_chunks):
        _scale_rows(of[rows], weight, eps, y[rows], rstd[rows])
    return y, total, mean, rstd


def _scale_rows(x: Tensor, weight: Tensor, eps: float, y: Tensor, rstd: Tensor) -> None:
    """Write y = x * rstd * weight, and rstd, for the rows of a block."""
    wide = x.to(rstd.dtype)
    h = torch.mul(wide, wide, out=y if y.dtype == wide.dtype else torch.empty_like(wide))
    torch.mean(h, 1, out=rstd).add_(eps).rsqrt_()
    torch.mul(torch.mul(wide, rstd[:, None], out=h), weight, out=y)


def _host_blocks(x: Tensor, num_chunks: int) -> Iterator[slice]:
    """Yield the rows of one block after the other; a block has rows of one chunk only."""
    chunk_rows, step = len(x) // num_chunks, _host_rows(x)
    for end in range(chunk_rows, len(x) + 1, max(1, chunk_rows)):
        for first in range(end - chunk_rows, end, step):
            yield slice(first, min(first + step, end))


def _host_rows(x: Tensor) -> int:
    """Return the rows of a float32 block of 1 MB, which stays in a core's caches from one pass to the next."""
    return max(1, (1 << 18) // x.shape[1])


def _backward_on_host(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    num_chunks: int,
    centered: bool,
    has_bias: bool,
) -> tuple[Tensor, Tensor]:
    dtype = rstd.dtype
    # Sums over strided rows would be in another order.
    dy, wide, weight = dy.to(dtype).contiguous(), total.to(dtype).contiguous(), weight.to(dtype)
    if centered:
        statistics = mean[:, None], rstd[:, None]
        # Without dw: it would be added in an order that depends on the number of threads.
        dx = torch.ops.aten.native_layer_norm_backward(
            dy, wide, weight.shape, *statistics, weight, None, [True, False, False]
        )[0]
    else:
        dx = torch.empty_like(wide)
    chunk_rows, step = len(wide) // num_chunks, _host_rows(wide)
    parts = rstd.new_zeros(1 + has_bias, num_chunks, cdiv(chunk_rows, step), wide.shape[1])
    memory = rstd.new_empty(1 if centered else 2, min(step, chunk_rows), wide.shape[1])
    for i_chunk, i_part in itertools.product(*map(range, parts.shape[1:3])):
        first = i_chunk * chunk_rows + i_part * step
        rows = slice(first, min(first + step, (i_chunk + 1) * chunk_rows))
        h, *others = memory[:, : rows.stop - rows.start]
        if centered:
            torch.sub(wide[rows], mean[rows, None], out=h).mul_(rstd[rows, None])
        else:
            (product,) = others
            torch.mul(wide[rows], rstd[rows, None], out=h)
            g = torch.mul(dy[rows], weight, out=dx[rows])
            slope = torch.mul(g, h, out=product).mean(1, keepdim=True)
            g.sub_(torch.mul(h, slope, out=product)).mul_(rstd[rows, None])
        torch.sum(h.mul_(dy[rows]), 0, out=parts[0, i_chunk, i_part])
        if has_bias:
            torch.sum(dy[rows], 0, out=parts[1, i_chunk, i_part])
    if dtotal is not None:
        dx.add_(dtotal)
    return dx.to(total.dtype), parts.sum(2)


def norm_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    centered: bool,
    num_chunks: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `norm_op` without torch's dispatcher, for callers inside a Function of their own.

    Args:
        num_chunks: equal parts of the rows; on a CPU each operation of rms_norm takes rows of one of them.
    """
    if by_triton(x):
        return launch_norm(x, weight, bias, residual, eps, centered)
    return _on_host(x, weight, bias, residual, eps, centered, num_chunks)


def norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    num_chunks: int,
    centered: bool,
    has_bias: bool,
) -> tuple[Tensor, Tensor]:
    """Run `norm_backward_op` without torch's dispatcher."""
    backward = launch_norm_backward if by_triton(dy) else _backward_on_host
    return backward(dy, dtotal, total, weight, mean, rstd, num_chunks, centered, has_bias)


@torch.library.custom_op("tpkernels::norm", mutates_args=())
def norm_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (y, total, mean, rstd) of rows; total has no elements without a residual, mean none if not centered."""
    return norm_forward(x, weight, bias, residual, eps, centered)


@norm_op.register_fake
def _(x: Tensor, weight: Any, bias: Any, residual: Tensor | None, eps: float, centered: bool) -> tuple[Tensor, ...]:
    return empty_outputs(x, residual, centered)


@torch.library.custom_op("tpkernels::norm_backward", mutates_args=())
def norm_backward_op(
    dy: Tensor,
    dtotal: Tensor | None,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    num_chunks: int,
    centered: bool,
    has_bias: bool,
) -> tuple[Tensor, Tensor]:
    """Return (dx, sums[1 or 2, num_chunks, D]): dw, and db with a bias, per chunk of rows, in rstd's dtype."""
    return norm_backward(dy, dtotal, total, weight, mean, rstd, num_chunks, centered, has_bias)


@norm_backward_op.register_fake
def _(
    dy: Tensor,
    dtotal: Any,
    total: Tensor,
    weight: Any,
    mean: Any,
    rstd: Tensor,
    num_chunks: int,
    centered: bool,
    has_bias: bool,
) -> tuple[Tensor, Tensor]:
    return total.new_empty(total.shape), rstd.new_empty(1 + has_bias, num_chunks, total.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, residual, _, ctx.centered = inputs
    _, total, mean, rstd = output
    ctx.has_bias, ctx.has_residual = bias is not None, residual is not None
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x if residual is None else total, weight, mean, rstd)
    ctx.set_materialize_grads(False)


@differentiable_once
def _backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    total, weight, mean, rstd = ctx.saved_tensors
    dy = torch.zeros_like(total) if dy is None else dy
    dtotal = dtotal if ctx.has_residual else None
    dx, sums = norm_backward_op(dy, dtotal, total, weight, mean, rstd, 1, ctx.centered, ctx.has_bias)
    dw, *db = sums[:, 0].unbind(0)
    dbias = db[0].to(ctx.bias_dtype) if db else None
    return dx, dw.to(weight.dtype), dbias, dx if ctx.has_residual else None, None, None


norm_op.register_autograd(_backward, setup_context=_setup_context)


def _checked(x: Tensor, weight: Tensor, others: dict[str, Tensor | None], eps: float) -> Tensor:
    """Return x as rows; raise if tensors do not fit."""
    columns = x.shape[-1] if x.dim() else 0
    if not x.is_floating_point() or weight.shape != (columns,) or not 0 < columns <= _MOST_COLUMNS:
        raise ValueError(
            f"a norm takes x[..., D] of floating-point numbers and a weight [D], D from 1 to {_MOST_COLUMNS}: "
            f"x {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)}: pass a weight of x's last dim"
        )
    for name, other in others.items():
        shape = weight.shape if name == "bias" else x.shape
        if other is not None and (other.shape != shape or (name == "residual" and other.dtype != x.dtype)):
            raise ValueError(
                f"a norm's {name} must be {tuple(shape)} of {x.dtype}: got {tuple(other.shape)} {other.dtype}: "
                "reshape or convert it"
            )
    return x.reshape(-1, columns)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Scale each row to unit root mean square.

        y[T, D] = x * rstd * w,  rstd = (mean(x^2) + eps)^(-1/2)
        dx = rstd * (dy*w - h * mean(dy*w*h)),  h = x * rstd;   dw[D] = sum over rows of dy * h

    Args:
        x: [..., D], floating point, any strides; 0 < D <= 16384.
        weight: [D], of any floating-point dtype.
        eps: added to the mean square.

    Returns:
        y of x's shape and dtype, new and contiguous.

    Raises:
        ValueError: shapes that do not fit.

    Cost: forward reads x and writes y; backward reads x and dy, writes dx; keeps x and T statistics. On a CPU several
    passes in float32.
    Numerics: computed in float32, or float64 for float64, and rounded once; deterministic; the order of the weight
    gradient's sum depends on T only.
    Source: Zhang and Sennrich, NeurIPS 2019.
    """
    rows = _checked(x, weight, {}, eps)
    refuse_tangents("rms_norm", x, weight)
    y: Tensor = norm_op(rows, weight, None, None, eps, False)[0]
    return y.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Add a residual, then `rms_norm`, in one pass.

        total[T, D] = x + residual;   y[T, D] = rms_norm(total)

    Args:
        x, residual: [..., D], one shape and dtype, any strides.
        weight, eps: as rms_norm.

    Returns:
        (y, total), each of x's shape and dtype, new and contiguous.

    Raises:
        ValueError: shapes that do not fit.

    Cost: forward reads x and residual, writes y and total: four passes, where two operators need five. Backward reads
    dy, total and its other gradient, writes dx: four, where a norm and an addition need six.
    Numerics: as rms_norm of total as stored.

    """
    x, residual = promoted(x, residual)
    rows = _checked(x, weight, {"residual": residual}, eps)
    refuse_tangents("add_rms_norm", x, residual, weight)
    y, total, _, _ = norm_op(rows, weight, None, residual.reshape(rows.shape), eps, False)
    return y.view(x.shape), total.view(x.shape)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Shift and scale each row to mean 0 and variance 1.

        y[T, D] = (x - mean(x)) * rstd * w + b,  rstd = (mean((x - mean(x))^2) + eps)^(-1/2)

    Args:
        x, weight, eps: as rms_norm.
        bias: [D], or none.

    Returns, Raises, Cost, Numerics: as rms_norm; the variance is that of the centred row, not a difference of squares.
    Source: Ba, Kiros, Hinton, arXiv 1607.06450.
    """
    rows = _checked(x, weight, {"bias": bias}, eps)
    refuse_tangents("layer_norm", x, weight, bias)
    y: Tensor = norm_op(rows, weight, bias, None, eps, True)[0]
    return y.view(x.shape)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Add a residual, then `layer_norm`, in one pass; as add_rms_norm."""
    x, residual = promoted(x, residual)
    rows = _checked(x, weight, {"bias": bias, "residual": residual}, eps)
    refuse_tangents("add_layer_norm", x, residual, weight, bias)
    y, total, _, _ = norm_op(rows, weight, bias, residual.reshape(rows.shape), eps, True)
    return y.view(x.shape), total.view(x.shape)
