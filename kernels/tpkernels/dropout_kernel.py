"""Dropout in Triton: the kernel and its launch. The specification is dropout.py's `dropout_reference`.

Apart from dropout.py so that nothing loads triton before a CUDA tensor is dropped. Four words of one Philox call meet
four neighbouring elements of a row; a row begins a new call, so a program never needs its neighbours' words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of one program: 8 a thread of 4 warps, 16 bytes of float16. Not tuned: no GPU has timed it yet.
_BLOCK_ELEMENTS = 1024


@triton.jit(do_not_specialize=["num_rows", "first_row", "seed", "counter2", "counter3"])
def _dropout_kernel(
    x: tl.tensor,
    y: tl.tensor,
    num_rows: tl.int64,
    num_columns: tl.int32,
    stride_row: tl.int64,
    stride_column: tl.int64,
    first_row: tl.int64,
    first_group: tl.int32,
    groups_a_row: tl.int32,
    seed: tl.int64,
    counter2: tl.int32,
    counter3: tl.int32,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    SKIPPED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
) -> None:
    """y[num_rows, num_columns], contiguous, from x of any strides; the first group's first SKIPPED words go unused."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_group = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    # [BLOCK_ROWS, BLOCK_GROUPS]
    index = (o_row + first_row)[:, None] * groups_a_row + (o_group + first_group)[None, :]
    word0, word1, word2, word3 = tl.philox(seed, index.to(tl.uint32), (index >> 32).to(tl.uint32), counter2, counter3)
    # [BLOCK_ROWS, 4 * BLOCK_GROUPS]
    word = tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3))

    o_column = tl.program_id(1).to(tl.int64) * (4 * BLOCK_GROUPS) + tl.arange(0, 4 * BLOCK_GROUPS) - SKIPPED
    m_inside = (o_row < num_rows)[:, None] & ((o_column >= 0) & (o_column < num_columns))[None, :]
    # [BLOCK_ROWS, 4 * BLOCK_GROUPS]
    b_x = tl.load(x + o_row[:, None] * stride_row + o_column[None, :] * stride_column, mask=m_inside)
    # In float16 and bfloat16 the product has one rounding, on the way out.
    wide = b_x if b_x.dtype == tl.float64 else b_x.to(tl.float32)
    b_y = tl.where(word.to(tl.int64) >= THRESHOLD, wide * SCALE, 0.0)
    tl.store(y + o_row[:, None] * num_columns + o_column[None, :], b_y.to(b_x.dtype), mask=m_inside)


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

    Compiled once for each dtype, rate, alignment of the strides and first_column % 4; not for each number of rows.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return y
    num_rows, num_columns = x.shape
    num_groups = -(-(first_column % 4 + num_columns) // 4)
    block_groups = min(triton.next_power_of_2(num_groups), _BLOCK_ELEMENTS // 4)
    block_rows = _BLOCK_ELEMENTS // 4 // block_groups
    with torch.cuda.device_of(x):
        _dropout_kernel[triton.cdiv(num_rows, block_rows), triton.cdiv(num_groups, block_groups)](
            x,
            y,
            num_rows,
            num_columns,
            x.stride(0),
            x.stride(1),
            first_row,
            first_column // 4,
            -(-row_length // 4),
            _signed(key[1] << 32 | key[0], 64),
            _signed(counter[0], 32),
            _signed(counter[1], 32),
            THRESHOLD=round(rate * 2**32),
            SCALE=1 / (1 - rate),
            SKIPPED=first_column % 4,
            BLOCK_ROWS=block_rows,
            BLOCK_GROUPS=block_groups,
            num_warps=4,
        )
    return y


def _signed(word: int, num_bits: int) -> int:
    """The signed integer of the same bits: what an argument of that width holds without being widened."""
    return word - (1 << num_bits) if word >> (num_bits - 1) else word
