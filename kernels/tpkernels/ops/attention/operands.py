"""How attention's kernels read q, k, v and dy: by descriptors of TMA boxes where they can, else by pointers.

A descriptor is of [B, heads, rows, E], with the tensor's strides, and a box has rows of one head. What is beyond the
rows or the columns reads as 0, as it must: so packed documents, which end within a tensor, are read by pointers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tpkernels.launch import Target, tl
from tpkernels.ops.attention.problem import Sides


def are_described(target: Target, sides: Sides, *tensors: Tensor) -> bool:
    """Return whether TMA can read tensors [B, S, heads, E]: all of them, so that a kernel has two variants, not 16."""
    if tl is None or target.backend != "cuda" or int(target.arch) < 90 or sides.query_starts is not None:
        return False
    return all(map(_is_readable, tensors))


def _is_readable(t: Tensor) -> bool:
    """Return whether 16-bit rows begin at multiples of 16 bytes, and none twice, as those of an expanded tensor do."""
    begins = [t.data_ptr(), *(stride * t.element_size() for _, stride in _gaps(t))]
    return (
        t.element_size() == 2
        and t.numel() > 0
        and all(begin % 16 == 0 for begin in begins)
        and all(0 < stride * t.element_size() < 1 << 40 for _, stride in _gaps(t))
        and max(t.shape) < 1 << 31
    )


def _gaps(t: Tensor) -> list[tuple[int, int]]:
    """Return (size, stride) of the dims before the last that have more than one place."""
    return [(size, stride) for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True) if size > 1]


def operand(t: Tensor, block_rows: int, block_columns: int, is_described: bool) -> Any:
    """Return the kernel argument for reading t[B, S, heads, E] by blocks of rows of a head."""
    if not is_described:
        return t
    from triton.tools.tensor_descriptor import TensorDescriptor

    heads_first = t.transpose(1, 2)
    # The stride of a dim with one place may be anything, but a descriptor's must be a multiple of 16 bytes.
    strides = [stride if size > 1 else 8 for size, stride in zip(heads_first.shape, heads_first.stride(), strict=True)]
    return TensorDescriptor(t, list(heads_first.shape), [*strides[:3], 1], [1, 1, block_rows, block_columns])
