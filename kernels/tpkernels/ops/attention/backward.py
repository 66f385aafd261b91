"""Attention backward in Triton: a kernel for dq, one for dk and dv, no atomics.

    p = exp2(s - lse * log2(e));   ds = p * (drop(dy v.T) - delta),  delta = sum(dy * y)
    dv = drop(p).T dy;   dk = ds.T q * scale;   dq = ds k * scale

A program of dq (query_gradient.py) has a block of queries of one head and loops over keys. A program of dk and dv
(key_gradient.py) has a block of keys of one KV head and loops over the queries of all query heads of its group, or of
some of them. So every element is written by one program, in an order that depends on shapes only. The price: scores are
computed twice, 7 products instead of 5. Here are the preparation of both and the launches.

Source: Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tpkernels.launch import LOG2_E, cdiv, jit, power_of_2, run, target_of, tl
from tpkernels.ops.attention.configs import KEY_GRADIENT, KEY_GRADIENT_OF_SEVERAL, QUERY_GRADIENT, config_of
from tpkernels.ops.attention.key_gradient import key_gradient_kernel
from tpkernels.ops.attention.problem import (
    NOT_SPECIALIZED,
    Options,
    Sides,
    Tables,
    constants,
    dropout_numbers,
    num_blocks,
    sizes,
)
from tpkernels.ops.attention.query_gradient import query_gradient_kernel
from tpkernels.ops.attention.tiles import document_of, load_halves, store_halves

# Programs that occupy every processor of today's largest GPUs. With fewer, a group's query heads are divided.
_ENOUGH_PROGRAMS = 264


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


@jit(do_not_specialize=["num_queries"])
def _delta_kernel(
    p_y: tl.tensor,
    p_dy: tl.tensor,
    p_delta: tl.tensor,
    num_queries: tl.int32,
    num_heads: tl.int32,
    stride_dy_batch: tl.int64,
    stride_dy: tl.int64,
    stride_dy_head: tl.int64,
    HEAD: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
) -> None:
    """Compute delta [B, num_heads, num_queries] = sum(dy * y); y is contiguous [B, num_queries, num_heads, HEAD]."""
    o_query = tl.program_id(0).to(tl.int64) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    i_head, i_batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_head = tl.arange(0, BLOCK_HEAD)
    m_inside = (o_query < num_queries)[:, None] & (o_head < HEAD)[None, :]
    o_y = ((i_batch * num_queries + o_query) * num_heads + i_head)[:, None] * HEAD + o_head[None, :]
    # [BLOCK_QUERIES, BLOCK_HEAD]
    b_y = tl.load(p_y + o_y, mask=m_inside, other=0.0).to(tl.float32)
    p_dy += i_batch * stride_dy_batch + i_head * stride_dy_head
    # [BLOCK_QUERIES, BLOCK_HEAD]
    b_dy = tl.load(p_dy + o_query[:, None] * stride_dy + o_head[None, :], mask=m_inside, other=0.0).to(tl.float32)
    o_delta = (i_batch * num_heads + i_head) * num_queries + o_query
    tl.store(p_delta + o_delta, tl.sum(b_y * b_dy, axis=1), mask=o_query < num_queries)


def launch_attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    tables: Tables,
    sides: Sides,
    options: Options,
) -> None:
    """Write dq, dk, dv into `gradients`, which have the shapes of q, k, v and no gaps in their last dims."""
    if tables.cos is not None:
        q = _rotated(q, tables, sides, k.shape[1], options, is_key=False)
        k = _rotated(k, tables, Sides(*reversed(sides)), q.shape[1], options, is_key=True)
    dq, dk, dv = gradients
    batch, num_queries, num_heads, head = q.shape
    meta = constants(q, k, options)
    common = (*sizes(q, k, sides), *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dy.stride()[:3])
    numbers = (options.scale * LOG2_E, options.window, *dropout_numbers(k, options))
    delta = torch.empty_like(lse)
    run(
        _delta_kernel,
        (cdiv(num_queries, 32), num_heads, batch),
        y,
        dy,
        delta,
        num_queries,
        num_heads,
        *dy.stride()[:3],
        HEAD=head,
        BLOCK_HEAD=2 * meta["HALF"],
        BLOCK_QUERIES=32,
        num_warps=4,
    )
    kind = (meta["HALF"], q.element_size(), options.rate > 0, target_of(q))
    tensors = (q, k, v, dy, *tables, *sides, lse, delta)
    config = config_of(QUERY_GRADIENT, *kind)
    run(
        query_gradient_kernel,
        (num_blocks(num_queries, sides.query_starts, config["BLOCK_QUERIES"]), num_heads, batch),
        *tensors,
        dq,
        *common,
        *dq.stride()[:3],
        *numbers,
        **meta,
        **config,
    )
    config = config_of(KEY_GRADIENT, *kind)
    blocks = num_blocks(k.shape[1], sides.key_starts, config["BLOCK_KEYS"])
    num_slots = _num_slots(blocks * k.shape[2] * batch, meta["NUM_HEADS_PER_GROUP"])
    if num_slots < meta["NUM_HEADS_PER_GROUP"]:
        config = config_of(KEY_GRADIENT_OF_SEVERAL, *kind)
    parts: Sequence[Tensor] = (dk, dv)
    if num_slots > 1:
        parts = tuple(torch.empty(num_slots, *of.shape, dtype=torch.float32, device=of.device) for of in (dk, dv))
    run(
        key_gradient_kernel,
        (blocks, k.shape[2] * num_slots, batch),
        *tensors,
        *parts,
        *common,
        parts[0].stride(0) if num_slots > 1 else 0,
        *parts[0].stride()[-4:-1],
        *parts[1].stride()[-4:-1],
        *numbers,
        NUM_SLOTS=num_slots,
        **meta,
        **config,
    )
    if num_slots > 1:
        for whole, of in zip((dk, dv), parts, strict=True):
            whole.copy_(of.sum(0))


def _rotated(x: Tensor, tables: Tables, sides: Sides, other_length: int, options: Options, is_key: bool) -> Tensor:
    """Return x[B, S, heads, E] rotated once, because the loops read it once per block of the other side."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    batch, length, num_heads, head = x.shape
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
        HALF=max(16, power_of_2(head // 2)),
        INTERLEAVED=options.interleaved,
        IS_KEY=is_key,
        BLOCK=32,
        num_warps=4,
    )
    return y


def _num_slots(num_programs: int, heads_per_group: int) -> int:
    """Return into how many parts a group's query heads are divided, so that every processor has a program.

    It depends on shapes only, so the order of sums does too; each part costs a float32 copy of dk and dv.
    """
    slots = 1
    while num_programs * slots < _ENOUGH_PROGRAMS and heads_per_group % (2 * slots) == 0:
        slots *= 2
    return slots
