"""Rotary embedding of queries or keys aside, for attention's kernels that would otherwise rotate a tile many times."""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.launch import jit, power_of_2, run, tl
from tpkernels.ops.attention.problem import NOT_SPECIALIZED, Options, Sides, Tables, num_blocks
from tpkernels.ops.attention.tiles import document_of, load_halves, store_halves


@jit(do_not_specialize=NOT_SPECIALIZED)
def _rotate_kernel(
    p_x: tl.tensor,
    p_y: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    p_starts: tl.tensor,
    p_other_starts: tl.tensor,
    num_documents: tl.int32,
    query_length: tl.int32,
    key_length: tl.int32,
    num_heads: tl.int32,
    stride_batch: tl.int64,
    stride: tl.int64,
    stride_head: tl.int64,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    IS_KEY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Rotate x, keys or queries, into y, contiguous [B, rows, num_heads, HEAD].

    The arguments named after queries describe x, those named after keys the other side. The last query of a document
    has the position of its last key.
    """
    i_head, i_batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_block, first, length, _, other_length = document_of(
        tl.program_id(0), p_starts, p_other_starts, num_documents, query_length, key_length, BLOCK
    )
    o_row = i_block * BLOCK + tl.arange(0, BLOCK)
    m_row = o_row < length
    o_position = o_row if IS_KEY else o_row + (other_length - length)
    p_x += i_batch * stride_batch + first * stride + i_head * stride_head
    low, high = load_halves(p_x, o_row, m_row, stride, p_cos, p_sin, o_position, HEAD, HALF, INTERLEAVED)
    stride_y = tl.cast(num_heads, tl.int64) * HEAD
    p_y += ((i_batch * query_length + first) * num_heads + i_head) * HEAD
    store_halves(p_y, o_row, m_row, stride_y, low, high, None, None, o_position, HEAD, HALF, INTERLEAVED)


def rotated(x: Tensor, tables: Tables, sides: Sides, other_length: int, options: Options, is_key: bool) -> Tensor:
    """Return x[B, S, heads, E] rotated once, because the loops read it once per block of the other side."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    batch, length, num_heads, head = x.shape
    half = max(16, power_of_2(head // 2))
    run(
        _rotate_kernel,
        (num_blocks(length, sides.query_starts, 32), num_heads, batch),
        x,
        y,
        *tables,
        *sides,
        0 if sides.query_starts is None else sides.query_starts.shape[0] - 1,
        length,
        other_length,
        num_heads,
        *x.stride()[:3],
        HEAD=head,
        HALF=half,
        INTERLEAVED=options.interleaved,
        IS_KEY=is_key,
        BLOCK=32,
        # Four warps spill heads of 256 on sm_100.
        num_warps=8 if half > 64 else 4,
    )
    return y
