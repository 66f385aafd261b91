"""Weight gradient of a matmul, accumulated where the caller wants it."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("tpkernels::wgrad_", mutates_args=("buffer",))
def _wgrad(buffer: Tensor, dy: Tensor, x: Tensor) -> None:
    accumulate_wgrad(buffer, dy, x)


@_wgrad.register_fake
def _(buffer: Tensor, dy: Tensor, x: Tensor) -> None:
    return None


def accumulate_wgrad(buffer: Tensor, dy: Tensor, x: Tensor) -> None:
    """`wgrad_` without its checks and without torch's dispatcher, for callers inside a Function of their own."""
    if x.dtype == buffer.dtype:
        buffer.addmm_(dy.T, x)
    elif x.is_cuda:
        buffer.add_(torch.mm(dy.T, x, out_dtype=buffer.dtype))
    else:
        # CPU GEMMs in bfloat16 accumulate in fp32 but return bfloat16: one rounding a call.
        buffer.add_(dy.T @ x)


def wgrad_(buffer: Tensor, dy: Tensor, x: Tensor) -> Tensor:
    """Accumulate a weight gradient in place.

        dw[out, in] += dy[T, out].T @ x[T, in]

    Args:
        buffer: dw, in x's dtype or a wider one.
        dy, x: T rows each, one dtype.

    Returns:
        `buffer`.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Cost: 2*T*out*in flops. Numerics: where the dtypes agree the GEMM itself accumulates; else it rounds to x's dtype
    once on a CPU, and to the buffer's on a GPU.
    """
    if dy.shape[:-1] != x.shape[:-1] or buffer.shape != (dy.shape[-1], x.shape[-1]) or dy.dtype != x.dtype:
        raise ValueError(
            f"dw[out, in] += dy[T, out].T @ x[T, in] needs matching shapes and one dtype: dw {tuple(buffer.shape)}, "
            f"dy {tuple(dy.shape)} {dy.dtype}, x {tuple(x.shape)} {x.dtype}: pass dy and x of one call"
        )
    _wgrad(buffer, dy, x)
    return buffer
