"""Gradients of keys and values in Triton: a program has a block of keys of one KV head and loops over the queries.

    dv = drop(p).T dy;   dk = ds.T q * scale        of all query heads of the group, or of a part of them

Source: Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2.
"""

from __future__ import annotations

from tpkernels.launch import dot, jit, tl
from tpkernels.ops.attention.problem import NOT_SPECIALIZED
from tpkernels.ops.attention.tiles import document_of, kept, load_rows, query_range, visible


@jit(do_not_specialize=NOT_SPECIALIZED)
def key_gradient_kernel(
    p_q: tl.tensor,
    p_k: tl.tensor,
    p_v: tl.tensor,
    p_dy: tl.tensor,
    p_query_starts: tl.tensor,
    p_key_starts: tl.tensor,
    p_lse: tl.tensor,
    p_delta: tl.tensor,
    p_dk: tl.tensor,
    p_dv: tl.tensor,
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
    stride_d_slot: tl.int64,
    stride_dk_batch: tl.int64,
    stride_dk: tl.int64,
    stride_dk_head: tl.int64,
    stride_dv_batch: tl.int64,
    stride_dv: tl.int64,
    stride_dv_head: tl.int64,
    scale: tl.float32,
    window: tl.int32,
    groups_per_row: tl.int32,
    first_row_head: tl.int32,
    num_row_heads: tl.int32,
    seed: tl.int64,
    counter2: tl.int32,
    counter3: tl.int32,
    NUM_SLOTS: tl.constexpr,
    NUM_HEADS_PER_GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    THRESHOLD: tl.constexpr,
    KEEP_SCALE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
) -> None:
    """Compute dk and dv of one block of keys of one KV head per program.

    A group's query heads are divided into NUM_SLOTS parts, each with a copy of dk and dv; a program adds one part.
    """
    i_group, i_slot = (tl.program_id(1) // NUM_SLOTS).to(tl.int64), (tl.program_id(1) % NUM_SLOTS).to(tl.int64)
    i_batch = tl.program_id(2).to(tl.int64)
    i_block, first_key, key_length, first_query, query_length = document_of(
        tl.program_id(0), p_key_starts, p_query_starts, num_documents, key_length, query_length, BLOCK_KEYS
    )
    i_key = i_block * BLOCK_KEYS
    if i_key >= key_length:
        return
    o_key = i_key + tl.arange(0, BLOCK_KEYS)
    p_k += i_batch * stride_k_batch + first_key * stride_k + i_group * stride_k_head
    p_v += i_batch * stride_v_batch + first_key * stride_v + i_group * stride_v_head
    # [BLOCK_KEYS, BLOCK_HEAD]
    b_k = load_rows(p_k, i_key, key_length, stride_k, HEAD, BLOCK_HEAD, BLOCK_KEYS)
    # [BLOCK_KEYS, BLOCK_HEAD]
    b_v = load_rows(p_v, i_key, key_length, stride_v, HEAD, BLOCK_HEAD, BLOCK_KEYS)
    b_dk = tl.zeros([BLOCK_KEYS, BLOCK_HEAD], tl.float32)
    b_dv = tl.zeros([BLOCK_KEYS, BLOCK_HEAD], tl.float32)
    begin, full_begin, full_end, end = query_range(
        i_key, query_length, key_length, window, CAUSAL, WINDOWED, BLOCK_QUERIES, BLOCK_KEYS
    )
    NUM_HEADS_PER_SLOT: tl.constexpr = NUM_HEADS_PER_GROUP // NUM_SLOTS
    for i_member in range(0, NUM_HEADS_PER_SLOT):
        i_head = i_group * NUM_HEADS_PER_GROUP + i_slot * NUM_HEADS_PER_SLOT + i_member
        o_statistics = (i_batch * num_heads + i_head) * num_queries + first_query
        first_row = (i_batch * num_row_heads + first_row_head + i_head) * num_queries + first_query
        p_head_q = p_q + i_batch * stride_q_batch + first_query * stride_q + i_head * stride_q_head
        p_head_dy = p_dy + i_batch * stride_dy_batch + first_query * stride_dy + i_head * stride_dy_head
        for i_query in tl.range(begin, end, BLOCK_QUERIES):
            o_query = i_query + tl.arange(0, BLOCK_QUERIES)
            m_query = o_query < query_length
            # [BLOCK_QUERIES, BLOCK_HEAD]
            b_q = load_rows(p_head_q, i_query, query_length, stride_q, HEAD, BLOCK_HEAD, BLOCK_QUERIES)
            b_s = dot(b_k, tl.trans(b_q), tl.zeros([BLOCK_KEYS, BLOCK_QUERIES], tl.float32)) * scale
            # [BLOCK_QUERIES]
            lse = tl.load(p_lse + o_statistics + o_query, mask=m_query, other=0.0) * 1.4426950408889634
            # A query that sees no key has lse = -inf; its p is masked, but -inf - -inf would be NaN.
            b_p = tl.exp2(b_s - tl.where(lse == float("-inf"), 0.0, lse)[None, :])
            if (i_query < full_begin) | (i_query >= full_end):
                m_see = visible(o_query[None, :], o_key[:, None], query_length, key_length, window, CAUSAL, WINDOWED)
                b_p = tl.where(m_see, b_p, 0.0)
            # [BLOCK_QUERIES, BLOCK_HEAD]
            b_dy = load_rows(p_head_dy, i_query, query_length, stride_dy, HEAD, BLOCK_HEAD, BLOCK_QUERIES)
            b_dp = dot(b_v, tl.trans(b_dy), tl.zeros([BLOCK_KEYS, BLOCK_QUERIES], tl.float32))
            if THRESHOLD > 0:
                row = first_row + o_query
                m_keep = tl.trans(kept(row, i_key, groups_per_row, seed, counter2, counter3, THRESHOLD, BLOCK_KEYS))
                b_dv = dot(tl.where(m_keep, b_p * KEEP_SCALE, 0.0).to(b_dy.dtype), b_dy, b_dv)
                b_dp = tl.where(m_keep, b_dp * KEEP_SCALE, 0.0)
            else:
                b_dv = dot(b_p.to(b_dy.dtype), b_dy, b_dv)
            # [BLOCK_QUERIES]
            delta = tl.load(p_delta + o_statistics + o_query, mask=m_query, other=0.0)
            b_ds = (b_p * (b_dp - delta[None, :])).to(b_q.dtype)
            b_dk = dot(b_ds, b_q, b_dk)
    o_head = tl.arange(0, BLOCK_HEAD)
    m_inside = (o_key < key_length)[:, None] & (o_head < HEAD)[None, :]
    p_dk += i_slot * stride_d_slot + i_batch * stride_dk_batch + first_key * stride_dk + i_group * stride_dk_head
    b_dk *= scale * 0.6931471805599453
    tl.store(p_dk + o_key[:, None] * stride_dk + o_head[None, :], b_dk.to(p_dk.dtype.element_ty), mask=m_inside)
    p_dv += i_slot * stride_d_slot + i_batch * stride_dv_batch + first_key * stride_dv + i_group * stride_dv_head
    tl.store(p_dv + o_key[:, None] * stride_dv + o_head[None, :], b_dv.to(p_dv.dtype.element_ty), mask=m_inside)
