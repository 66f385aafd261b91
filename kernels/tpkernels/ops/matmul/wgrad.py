"""Weight gradient of a matmul, accumulated where the caller wants it.

Products of 16 bits with a float32 buffer, as in training, are added on a GPU without a tensor of the buffer's size
beside it: by torch.addmm, which is cuBLAS, or by the matmul kernel; wgrad_choice.py says which. If the dtypes agree,
torch's own product accumulates too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.launch import INTERPRETED
from tpkernels.ops.matmul.kernel import launch_matmul
from tpkernels.ops.matmul.operator import has_kernel
from tpkernels.ops.matmul.wgrad_choice import add_by_torch, is_torchs


@torch.library.custom_op("tpkernels::wgrad_", mutates_args=("buffer",))
def _wgrad(buffer: Tensor, dy: Tensor, x: Tensor) -> None:
    accumulate_wgrad(buffer, dy, x)


@_wgrad.register_fake
def _(buffer: Tensor, dy: Tensor, x: Tensor) -> None:
    return None


def accumulate_wgrad(buffer: Tensor, dy: Tensor, x: Tensor) -> None:
    """Run `wgrad_` without its checks and torch's dispatcher, for callers inside a Function of their own."""
    if is_torchs(buffer, dy, x):
        add_by_torch(buffer, dy, x)
    elif adds_in_place(buffer, x):
        launch_matmul(dy.T, x, out=buffer, accumulate=True)
    elif x.dtype == buffer.dtype:
        buffer.addmm_(dy.T, x)
    elif x.is_cuda:
        buffer.add_(torch.mm(dy.T, x, out_dtype=buffer.dtype))
    else:
        # CPU GEMMs in bfloat16 accumulate in fp32 but return bfloat16: one rounding per call.
        buffer.add_(dy.T @ x)


def adds_in_place(buffer: Tensor, x: Tensor) -> bool:
    """Return whether our kernel adds to the buffer, or torch in its place: without a product of its size beside it."""
    if not has_kernel(x):
        return False
    if x.dtype == buffer.dtype:
        return INTERPRETED and not x.is_cuda
    return x.dtype.itemsize == 2 and buffer.dtype == torch.float32


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

    Cost: 2*T*out*in flops; reads dy and x, reads and writes dw. On a CPU with a wider buffer also a product of dw's
    size in x's dtype.
    Numerics: if the dtypes agree the GEMM itself accumulates; else the product is added in the buffer's dtype: on a GPU
    as summed, on a CPU rounded once to x's dtype. Deterministic where torch is told to be: then our kernel adds; else
    on CUDA cuBLAS may.
    """
    if (
        dy.ndim != 2
        or x.ndim != 2
        or len(dy) != len(x)
        or buffer.shape != (dy.shape[-1], x.shape[-1])
        or dy.dtype != x.dtype
    ):
        raise ValueError(
            f"dw[out, in] += dy[T, out].T @ x[T, in] needs matching shapes and one dtype: dw {tuple(buffer.shape)}, "
            f"dy {tuple(dy.shape)} {dy.dtype}, x {tuple(x.shape)} {x.dtype}: pass dy and x of one call"
        )
    is_wider = buffer.dtype.is_floating_point and buffer.dtype.itemsize > x.dtype.itemsize
    if buffer.dtype != x.dtype and not is_wider:
        raise ValueError(
            f"dw must have x's dtype or a wider one: dw {buffer.dtype}, x {x.dtype}: accumulate into "
            f"{torch.float32 if x.dtype.itemsize < 4 else x.dtype}"
        )
    _wgrad(buffer, dy, x)
    return buffer
