"""Dropout in Triton: the kernel and its launch. The specification is dropout.py's `dropout_reference`.

The four words of one Philox call belong to four neighbouring elements of a row. A row begins a new call, so a program
never needs its neighbours' words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.launch import cdiv, jit, power_of_2, run, signed, tl, widened

# Elements of one program: 8 per thread of 4 warps, 16 bytes of float16. Not tuned: no GPU has timed it yet.
_BLOCK_ELEMENTS = 1024


@jit(do_not_specialize=["num_rows", "first_row", "seed", "counter2", "counter3"])
def _dropout_kernel(
    p_x: tl.tensor,
    p_y: tl.tensor,
    num_rows: tl.int64,
    num_columns: tl.int32,
    stride_row: tl.int64,
    first_row: tl.int64,
    first_group: tl.int32,
    groups_per_row: tl.int32,
    seed: tl.int64,
    counter2: tl.int32,
    counter3: tl.int32,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    SKIPPED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
) -> None:
    """Write y[num_rows, num_columns], contiguous, from x, whose rows have no gaps.

    The first SKIPPED words of a row are not used: they belong to columns before x's first.
    """
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_group = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    # [BLOCK_ROWS, BLOCK_GROUPS]
    index = (o_row + first_row)[:, None] * groups_per_row + (o_group + first_group)[None, :]
    word0, word1, word2, word3 = tl.philox(seed, index.to(tl.uint32), (index >> 32).to(tl.uint32), counter2, counter3)
    # [BLOCK_ROWS, 4 * BLOCK_GROUPS]
    word = tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3))

    o_column = tl.program_id(1).to(tl.int64) * (4 * BLOCK_GROUPS) + tl.arange(0, 4 * BLOCK_GROUPS) - SKIPPED
    m_inside = (o_row < num_rows)[:, None] & ((o_column >= 0) & (o_column < num_columns))[None, :]
    # [BLOCK_ROWS, 4 * BLOCK_GROUPS]
    b_x = widened(tl.load(p_x + o_row[:, None] * stride_row + o_column[None, :], mask=m_inside))
    b_y = tl.where(word.to(tl.int64) >= THRESHOLD, b_x * SCALE, 0.0)
    tl.store(p_y + o_row[:, None] * num_columns + o_column[None, :], b_y.to(p_y.dtype.element_ty), mask=m_inside)


def launch_dropout(
    x: Tensor,
    rate: float,
    key: tuple[int, int],
    counter: tuple[int, int],
    first_row: int,
    first_column: int,
    row_length: int,
) -> Tensor:
    """Return dropout of x[rows, columns], contiguous, by the kernel; arguments as the operator tpkernels::dropout.

    It is compiled once per dtype, rate, alignment of the row stride and first_column % 4; not per number of rows.
    """
    # A column stride argument would not be known to be 1, and each element would be loaded separately.
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, num_columns = x.shape
    num_groups = cdiv(first_column % 4 + num_columns, 4)
    block_groups = min(power_of_2(num_groups), _BLOCK_ELEMENTS // 4)
    block_rows = _BLOCK_ELEMENTS // 4 // block_groups
    run(
        _dropout_kernel,
        (cdiv(num_rows, block_rows), cdiv(num_groups, block_groups)),
        x,
        y,
        num_rows,
        num_columns,
        x.stride(0),
        first_row,
        first_column // 4,
        cdiv(row_length, 4),
        signed(key[1] << 32 | key[0], 64),
        signed(counter[0], 32),
        signed(counter[1], 32),
        THRESHOLD=round(rate * 2**32),
        SCALE=1 / (1 - rate),
        SKIPPED=first_column % 4,
        BLOCK_ROWS=block_rows,
        BLOCK_GROUPS=block_groups,
        num_warps=4,
    )
    return y
