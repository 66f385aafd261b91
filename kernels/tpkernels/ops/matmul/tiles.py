"""One tile of a matmul, as device functions that the plain and the fused kernels share.

    acc[BLOCK_M, BLOCK_N] += A[row : row + BLOCK_M, :] @ B[:, column : column + BLOCK_N]

One dim of each operand has no gaps: A[M, K] is by rows (K without gaps) or by columns (M without gaps), B[K, N] by rows
(N without gaps) or by columns (K without gaps, as a torch weight's transpose). So forward (x @ w.T: A by rows, B by
columns), dgrad (dy @ w: both by rows) and wgrad (dy.T @ x: A by columns, B by rows) all read their operands in place.

An operand is a pointer, or a descriptor of a TMA box (`described`), made on the host. Data that arrives under a flag
while the kernel runs is read through pointers: TMA reads by another path than the flag's, and triton has no fence
between the two.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tpkernels.launch import Target, dot, jit, tl

# Sizes that change with every call come and go.
_MOST_DESCRIPTORS = 4096


def described(matrix: Tensor, block: tuple[int, int]) -> Any:
    """Return a TMA descriptor of boxes of a matrix that `may_be_described`; the last dim has no gaps."""
    checked = _checked_descriptor(matrix.shape, matrix.stride(), matrix.dtype, block)
    one = object.__new__(type(checked))
    vars(one).update(vars(checked), base=matrix)
    return one


@functools.lru_cache(_MOST_DESCRIPTORS)
def _checked_descriptor(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, block: tuple[int, int]
) -> Any:
    """Return a descriptor of no memory: triton checks each anew that it makes, which takes longer than a launch."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    nothing = torch.empty(0, dtype=dtype, device="meta")
    return TensorDescriptor(nothing, list(shape), list(strides), list(block))


def may_be_described(matrix: Tensor, target: Target) -> bool:
    """Return whether the target has TMA and it can read a matrix without gaps in its last dim.

    Rows must begin at multiples of 16 bytes.
    """
    if tl is None or target.backend != "cuda" or int(target.arch) < 90:
        return False
    item = matrix.element_size()
    return (
        item == 2
        and matrix.numel() > 0
        and matrix.stride(0) * item % 16 == 0
        and matrix.data_ptr() % 16 == 0
        and max(matrix.shape) < 2**31
    )


@jit
def place(i_tile: tl.tensor, num_m: tl.tensor, num_n: tl.tensor, GROUP_M: tl.constexpr) -> tl.tensor:
    """Return the row and the column of a tile, counted in tiles.

    The order goes down GROUP_M tiles before it goes right: tiles that are computed at the same time share operands in
    L2.
    """
    tiles_per_group = GROUP_M * num_n
    first_m = i_tile // tiles_per_group * GROUP_M
    num_rows = min(num_m - first_m, GROUP_M)
    within = i_tile % tiles_per_group
    return first_m + within % num_rows, within // num_rows


@jit
def multiply(
    acc: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    end_row: tl.tensor,
    end_column: tl.tensor,
    depth: tl.tensor,
    stride_a: tl.tensor,
    stride_b: tl.tensor,
    A_BY_ROWS: tl.constexpr,
    B_BY_ROWS: tl.constexpr,
    TMA_A: tl.constexpr,
    TMA_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Return acc + A[row:, :depth] @ B[:depth, column:] for one tile.

    The tile's rows from end_row on, and columns from end_column on, are not to be stored. There pointers load zeros,
    and TMA loads whatever the matrix holds.

    Args:
        a, b: pointers to row 0 and column 0, or descriptors.
        stride_a, stride_b: of the dim that has gaps, in elements.
    """
    o_m = row + tl.arange(0, BLOCK_M)
    o_n = column + tl.arange(0, BLOCK_N)
    m_m, m_n = o_m < end_row, o_n < end_column
    for i_k in tl.range(0, depth, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = o_k < depth
        # [BLOCK_M, BLOCK_K]
        if TMA_A:
            b_a = a.load([row, i_k]) if A_BY_ROWS else tl.trans(a.load([i_k, row]))
        elif A_BY_ROWS:
            p_a = a + o_m.to(tl.int64)[:, None] * stride_a + o_k[None, :]
            b_a = tl.load(p_a, mask=m_m[:, None] & m_k[None, :], other=0.0)
        else:
            p_a = a + o_k.to(tl.int64)[None, :] * stride_a + o_m[:, None]
            b_a = tl.load(p_a, mask=m_m[:, None] & m_k[None, :], other=0.0)
        # [BLOCK_K, BLOCK_N]
        if TMA_B:
            b_b = b.load([i_k, column]) if B_BY_ROWS else tl.trans(b.load([column, i_k]))
        elif B_BY_ROWS:
            p_b = b + o_k.to(tl.int64)[:, None] * stride_b + o_n[None, :]
            b_b = tl.load(p_b, mask=m_k[:, None] & m_n[None, :], other=0.0)
        else:
            p_b = b + o_n.to(tl.int64)[None, :] * stride_b + o_k[:, None]
            b_b = tl.load(p_b, mask=m_k[:, None] & m_n[None, :], other=0.0)
        acc = dot(b_a, b_b, acc)
    return acc
