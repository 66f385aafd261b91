"""Attention forward in Triton: a program has a block of queries of one head and loops over the keys that they see.

Keys that all of the block's queries see are looped over separately from keys that only some see, so that most tiles
need no mask. Scores are s = q k.T * scale * log2(e), so that exp2 is the exponential. Rotary embedding rotates queries
when they are loaded, and keys before: many programs read them.

Source: Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.launch import LOG2_E, dot, jit, run, target_of, tl
from tpkernels.ops.attention.configs import FORWARD, config_of
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
from tpkernels.ops.attention.rotation import rotated
from tpkernels.ops.attention.tiles import document_of, kept, key_range, load_halves, visible


@jit
def _attend(
    b_y: tl.tensor,
    b_max: tl.tensor,
    b_sum: tl.tensor,
    q_low: tl.tensor,
    q_high: tl.tensor,
    p_k: tl.tensor,
    p_v: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    o_query: tl.tensor,
    query_length: tl.tensor,
    key_length: tl.tensor,
    stride_k: tl.int64,
    stride_v: tl.int64,
    scale: tl.float32,
    window: tl.int32,
    row: tl.tensor,
    groups_per_row: tl.int32,
    seed: tl.int64,
    counter2: tl.int32,
    counter3: tl.int32,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    THRESHOLD: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
) -> Any:
    """Add the keys from begin to end to a block of queries: return its new (b_y, b_max, b_sum).

    MASKED says that some of the queries do not see some of these keys.
    """
    o_head = tl.arange(0, 2 * HALF)
    for i_key in tl.range(begin, end, BLOCK_KEYS):
        o_key = i_key + tl.arange(0, BLOCK_KEYS)
        m_key = o_key < key_length
        k_low, k_high = load_halves(p_k, o_key, m_key, stride_k, None, None, o_key, HEAD, HALF, INTERLEAVED)
        b_s = dot(q_low, tl.trans(k_low), tl.zeros([q_low.shape[0], BLOCK_KEYS], tl.float32))
        b_s = dot(q_high, tl.trans(k_high), b_s)
        if MASKED:
            m_see = visible(o_query[:, None], o_key[None, :], query_length, key_length, window, CAUSAL, WINDOWED)
            b_s = tl.where(m_see, b_s, float("-inf"))
        # Scaled after the maximum, scores need one multiply-add each.
        largest = tl.maximum(b_max, tl.max(b_s, axis=1) * scale)
        # In a row that has seen no key yet, -inf - -inf would be NaN: shift by 0 instead.
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        b_p = tl.exp2(b_s * scale - shift[:, None])
        shrink = tl.exp2(b_max - shift)
        b_sum = b_sum * shrink + tl.sum(b_p, axis=1)
        b_max = largest
        if THRESHOLD > 0:
            m_keep = kept(row, i_key, groups_per_row, seed, counter2, counter3, THRESHOLD, BLOCK_KEYS)
            b_p = tl.where(m_keep, b_p, 0.0)
        # [BLOCK_KEYS, 2 * HALF]
        b_v = tl.load(
            p_v + o_key[:, None] * stride_v + o_head[None, :],
            mask=m_key[:, None] & (o_head < HEAD)[None, :],
            other=0.0,
        )
        b_y = dot(b_p.to(b_v.dtype), b_v, b_y * shrink[:, None])
    return b_y, b_max, b_sum


@jit(do_not_specialize=NOT_SPECIALIZED)
def _attention_kernel(
    p_q: tl.tensor,
    p_k: tl.tensor,
    p_v: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    p_query_starts: tl.tensor,
    p_key_starts: tl.tensor,
    p_y: tl.tensor,
    p_lse: tl.tensor,
    num_documents: tl.int32,
    query_length: tl.int32,
    key_length: tl.int32,
    num_queries: tl.int32,
    num_heads: tl.int32,
    stride_q_batch: tl.int64,
    stride_q: tl.int64,
    stride_q_head: tl.int64,
    stride_k_batch: tl.int64,
    stride_k: tl.int64,
    stride_k_head: tl.int64,
    stride_v_batch: tl.int64,
    stride_v: tl.int64,
    stride_v_head: tl.int64,
    scale: tl.float32,
    window: tl.int32,
    groups_per_row: tl.int32,
    first_row_head: tl.int32,
    num_row_heads: tl.int32,
    seed: tl.int64,
    counter2: tl.int32,
    counter3: tl.int32,
    NUM_HEADS_PER_GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEEP_SCALE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
) -> None:
    """Compute y and lse of one block of queries of one head per program.

    y is [B, num_queries, num_heads, HEAD], and lse is [B, num_heads, num_queries]. With tables, queries are rotated
    here; keys are rotated already.
    """
    # The last blocks of a causal document have the most work, so they start first.
    i_block = tl.num_programs(0) - 1 - tl.program_id(0)
    i_head, i_batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_block, first_query, query_length, first_key, key_length = document_of(
        i_block, p_query_starts, p_key_starts, num_documents, query_length, key_length, BLOCK_QUERIES
    )
    if i_block * BLOCK_QUERIES >= query_length:
        return
    o_query = i_block * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    m_query = o_query < query_length
    i_group = i_head // NUM_HEADS_PER_GROUP
    p_q += i_batch * stride_q_batch + first_query * stride_q + i_head * stride_q_head
    p_k += i_batch * stride_k_batch + first_key * stride_k + i_group * stride_k_head
    p_v += i_batch * stride_v_batch + first_key * stride_v + i_group * stride_v_head
    # Positions count from the document's first key; the last query has the position of the last key.
    o_position = o_query + (key_length - query_length)
    q_low, q_high = load_halves(p_q, o_query, m_query, stride_q, p_cos, p_sin, o_position, HEAD, HALF, INTERLEAVED)

    row = (i_batch * num_row_heads + first_row_head + i_head) * num_queries + first_query + o_query
    b_y = tl.zeros([BLOCK_QUERIES, 2 * HALF], tl.float32)
    b_max = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_QUERIES], tl.float32)
    begin, full_begin, full_end, end = key_range(
        i_block * BLOCK_QUERIES, query_length, key_length, window, CAUSAL, WINDOWED, BLOCK_QUERIES, BLOCK_KEYS
    )
    # Three ranges of keys: those that only some queries see, those that all see, again those that only some see. The
    # first is empty without a window. Only the middle one needs no mask.
    for PART in tl.static_range(0 if WINDOWED else 1, 3):
        if PART == 0:
            part_begin, part_end = begin, full_begin
        elif PART == 1:
            part_begin, part_end = full_begin, full_end
        else:
            part_begin, part_end = full_end, end
        b_y, b_max, b_sum = _attend(
            b_y,
            b_max,
            b_sum,
            q_low,
            q_high,
            p_k,
            p_v,
            part_begin,
            part_end,
            o_query,
            query_length,
            key_length,
            stride_k,
            stride_v,
            scale,
            window,
            row,
            groups_per_row,
            seed,
            counter2,
            counter3,
            HEAD,
            HALF,
            INTERLEAVED,
            CAUSAL,
            WINDOWED,
            THRESHOLD,
            PART != 1,
            BLOCK_KEYS,
        )
    # A query that sees no key has y = 0 and lse = -inf.
    b_y = b_y * (KEEP_SCALE / tl.where(b_sum == 0.0, 1.0, b_sum))[:, None]
    lse = (b_max + tl.log2(b_sum)) * 0.6931471805599453
    i_query = first_query + o_query
    o_head = tl.arange(0, 2 * HALF)
    o_y = ((i_batch * num_queries + i_query) * num_heads + i_head)[:, None] * HEAD + o_head[None, :]
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_query[:, None] & (o_head < HEAD)[None, :])
    tl.store(p_lse + (i_batch * num_heads + i_head) * num_queries + i_query, lse, mask=m_query)


def launch_attention(
    q: Tensor, k: Tensor, v: Tensor, tables: Tables, sides: Sides, options: Options
) -> tuple[Tensor, Tensor]:
    """Return (y [B, S, H, E], lse [B, H, S]) for q[B, S, H, E], k and v[B, S', G, E] without gaps in the last dims."""
    if tables.cos is not None:
        # Once per token, and not once per block of queries that sees it.
        k = rotated(k, tables, Sides(*reversed(sides)), q.shape[1], options, is_key=True)
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    meta = constants(q, k, options)
    config = config_of(FORWARD, meta["HALF"], q.element_size(), options.rate > 0, target_of(q))
    run(
        _attention_kernel,
        (num_blocks(q.shape[1], sides.query_starts, config["BLOCK_QUERIES"]), q.shape[2], q.shape[0]),
        q,
        k,
        v,
        *tables,
        *sides,
        y,
        lse,
        *sizes(q, k, sides),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        options.scale * LOG2_E,
        options.window,
        *dropout_numbers(k, options),
        **meta,
        **config,
    )
    return y, lse
