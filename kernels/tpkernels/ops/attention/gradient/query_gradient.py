"""Gradient of queries in Triton: a program has a block of queries of one head and loops over the keys that they see.

    dq = ds k * scale

Source: Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2.
"""

from __future__ import annotations

from typing import Any

from tpkernels.launch import dot, jit, tl
from tpkernels.ops.attention.problem import NOT_SPECIALIZED
from tpkernels.ops.attention.tiles import document_of, kept, key_range, load_halves, store_halves, visible


@jit
def _add_query_gradients(
    dq_low: tl.tensor,
    dq_high: tl.tensor,
    q_low: tl.tensor,
    q_high: tl.tensor,
    b_dy: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
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
    KEEP_SCALE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
) -> Any:
    """Add the contributions of the keys from begin to end to the dq of a block of queries.

    MASKED says that some of the queries do not see some of the keys.
    """
    o_head = tl.arange(0, 2 * HALF)
    for i_key in tl.range(begin, end, BLOCK_KEYS):
        o_key = i_key + tl.arange(0, BLOCK_KEYS)
        m_key = o_key < key_length
        k_low, k_high = load_halves(p_k, o_key, m_key, stride_k, None, None, o_key, HEAD, HALF, INTERLEAVED)
        b_s = dot(q_low, tl.trans(k_low), tl.zeros([BLOCK_QUERIES, BLOCK_KEYS], tl.float32))
        b_s = dot(q_high, tl.trans(k_high), b_s) * scale
        b_p = tl.exp2(b_s - lse[:, None])
        if MASKED:
            m_see = visible(o_query[:, None], o_key[None, :], query_length, key_length, window, CAUSAL, WINDOWED)
            b_p = tl.where(m_see, b_p, 0.0)
        # [BLOCK_KEYS, 2 * HALF]
        b_v = tl.load(
            p_v + o_key[:, None] * stride_v + o_head[None, :],
            mask=m_key[:, None] & (o_head < HEAD)[None, :],
            other=0.0,
        )
        b_dp = dot(b_dy, tl.trans(b_v), tl.zeros([BLOCK_QUERIES, BLOCK_KEYS], tl.float32))
        if THRESHOLD > 0:
            m_keep = kept(row, i_key, groups_per_row, seed, counter2, counter3, THRESHOLD, BLOCK_KEYS)
            b_dp = tl.where(m_keep, b_dp * KEEP_SCALE, 0.0)
        b_ds = (b_p * (b_dp - delta[:, None])).to(k_low.dtype)
        dq_low = dot(b_ds, k_low, dq_low)
        dq_high = dot(b_ds, k_high, dq_high)
    return dq_low, dq_high


@jit(do_not_specialize=NOT_SPECIALIZED)
def query_gradient_kernel(
    p_q: tl.tensor,
    p_k: tl.tensor,
    p_v: tl.tensor,
    p_dy: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    p_query_starts: tl.tensor,
    p_key_starts: tl.tensor,
    p_lse: tl.tensor,
    p_delta: tl.tensor,
    p_dq: tl.tensor,
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
    stride_dy_batch: tl.int64,
    stride_dy: tl.int64,
    stride_dy_head: tl.int64,
    stride_dq_batch: tl.int64,
    stride_dq: tl.int64,
    stride_dq_head: tl.int64,
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
    """Compute dq of one block of queries of one head per program."""
    i_block = tl.num_programs(0) - 1 - tl.program_id(0)
    i_head, i_batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_block, first_query, query_length, first_key, key_length = document_of(
        i_block, p_query_starts, p_key_starts, num_documents, query_length, key_length, BLOCK_QUERIES
    )
    if i_block * BLOCK_QUERIES >= query_length:
        return
    o_query = i_block * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    m_query = o_query < query_length
    o_head = tl.arange(0, 2 * HALF)
    i_group = i_head // NUM_HEADS_PER_GROUP
    p_q += i_batch * stride_q_batch + first_query * stride_q + i_head * stride_q_head
    p_k += i_batch * stride_k_batch + first_key * stride_k + i_group * stride_k_head
    p_v += i_batch * stride_v_batch + first_key * stride_v + i_group * stride_v_head
    p_dy += i_batch * stride_dy_batch + first_query * stride_dy + i_head * stride_dy_head
    o_position = o_query + (key_length - query_length)
    q_low, q_high = load_halves(p_q, o_query, m_query, stride_q, None, None, o_query, HEAD, HALF, INTERLEAVED)
    # [BLOCK_QUERIES, 2 * HALF]
    b_dy = tl.load(
        p_dy + o_query[:, None] * stride_dy + o_head[None, :],
        mask=m_query[:, None] & (o_head < HEAD)[None, :],
        other=0.0,
    )
    o_statistics = (i_batch * num_heads + i_head) * num_queries + first_query + o_query
    # [BLOCK_QUERIES]
    lse = tl.load(p_lse + o_statistics, mask=m_query, other=0.0) * 1.4426950408889634
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    # [BLOCK_QUERIES]
    delta = tl.load(p_delta + o_statistics, mask=m_query, other=0.0)
    row = (i_batch * num_row_heads + first_row_head + i_head) * num_queries + first_query + o_query
    dq_low = tl.zeros([BLOCK_QUERIES, HALF], tl.float32)
    dq_high = tl.zeros([BLOCK_QUERIES, HALF], tl.float32)
    begin, full_begin, full_end, end = key_range(
        i_block * BLOCK_QUERIES, query_length, key_length, window, CAUSAL, WINDOWED, BLOCK_QUERIES, BLOCK_KEYS
    )
    for PART in tl.static_range(0 if WINDOWED else 1, 3):
        if PART == 0:
            part_begin, part_end = begin, full_begin
        elif PART == 1:
            part_begin, part_end = full_begin, full_end
        else:
            part_begin, part_end = full_end, end
        dq_low, dq_high = _add_query_gradients(
            dq_low,
            dq_high,
            q_low,
            q_high,
            b_dy,
            lse,
            delta,
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
            KEEP_SCALE,
            PART != 1,
            BLOCK_QUERIES,
            BLOCK_KEYS,
        )
    to_dq = scale * 0.6931471805599453
    p_dq += i_batch * stride_dq_batch + first_query * stride_dq + i_head * stride_dq_head
    store_halves(
        p_dq,
        o_query,
        m_query,
        stride_dq,
        dq_low * to_dq,
        dq_high * to_dq,
        p_cos,
        p_sin,
        o_position,
        HEAD,
        HALF,
        INTERLEAVED,
    )
