"""Gradient of queries in Triton, where kernel.py does not add it up: a program has queries, and loops over their keys.

    dq = ds k * scale

Source: Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2.
"""

from __future__ import annotations

from tpkernels.launch import dot, jit, tl
from tpkernels.ops.attention.problem import NOT_SPECIALIZED
from tpkernels.ops.attention.tiles import document_of, kept, key_range, load_rows, visible


@jit(do_not_specialize=NOT_SPECIALIZED)
def query_gradient_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    dy: tl.tensor,
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
    BY_TMA: tl.constexpr,
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
    """Compute dq of one block of queries of one head per program."""
    i_block = tl.num_programs(0) - 1 - tl.program_id(0)
    i_head, i_batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i_block, first_query, query_length, first_key, key_length, _ = document_of(
        i_block, p_query_starts, p_key_starts, num_documents, query_length, key_length, BLOCK_QUERIES
    )
    if i_block * BLOCK_QUERIES >= query_length:
        return
    o_query = i_block * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    m_query = o_query < query_length
    i_group = i_head // NUM_HEADS_PER_GROUP
    i_query = i_block * BLOCK_QUERIES
    if not BY_TMA:
        q += i_batch * stride_q_batch + first_query * stride_q + i_head * stride_q_head
        k += i_batch * stride_k_batch + first_key * stride_k + i_group * stride_k_head
        v += i_batch * stride_v_batch + first_key * stride_v + i_group * stride_v_head
        dy += i_batch * stride_dy_batch + first_query * stride_dy + i_head * stride_dy_head
    # [BLOCK_QUERIES, BLOCK_HEAD]
    b_q = load_rows(q, i_batch, i_head, i_query, query_length, stride_q, BY_TMA, HEAD, BLOCK_HEAD, BLOCK_QUERIES)
    # [BLOCK_QUERIES, BLOCK_HEAD]
    b_dy = load_rows(dy, i_batch, i_head, i_query, query_length, stride_dy, BY_TMA, HEAD, BLOCK_HEAD, BLOCK_QUERIES)
    o_statistics = (i_batch * num_heads + i_head) * num_queries + first_query + o_query
    # [BLOCK_QUERIES]
    lse = tl.load(p_lse + o_statistics, mask=m_query, other=0.0) * 1.4426950408889634
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    # [BLOCK_QUERIES]
    delta = tl.load(p_delta + o_statistics, mask=m_query, other=0.0)
    row = (i_batch * num_row_heads + first_row_head + i_head) * num_queries + first_query + o_query
    b_dq = tl.zeros([BLOCK_QUERIES, BLOCK_HEAD], tl.float32)
    begin, full_begin, full_end, end = key_range(
        i_block * BLOCK_QUERIES, query_length, key_length, window, CAUSAL, WINDOWED, BLOCK_QUERIES, BLOCK_KEYS
    )
    for i_key in tl.range(begin, end, BLOCK_KEYS):
        # [BLOCK_KEYS, BLOCK_HEAD]
        b_k = load_rows(k, i_batch, i_group, i_key, key_length, stride_k, BY_TMA, HEAD, BLOCK_HEAD, BLOCK_KEYS)
        b_s = dot(b_q, tl.trans(b_k), tl.zeros([BLOCK_QUERIES, BLOCK_KEYS], tl.float32)) * scale
        b_p = tl.exp2(b_s - lse[:, None])
        if (i_key < full_begin) | (i_key >= full_end):
            o_key = i_key + tl.arange(0, BLOCK_KEYS)
            m_see = visible(o_query[:, None], o_key[None, :], query_length, key_length, window, CAUSAL, WINDOWED)
            b_p = tl.where(m_see, b_p, 0.0)
        # [BLOCK_KEYS, BLOCK_HEAD]
        b_v = load_rows(v, i_batch, i_group, i_key, key_length, stride_v, BY_TMA, HEAD, BLOCK_HEAD, BLOCK_KEYS)
        b_dp = dot(b_dy, tl.trans(b_v), tl.zeros([BLOCK_QUERIES, BLOCK_KEYS], tl.float32))
        if THRESHOLD > 0:
            m_keep = kept(row, i_key, groups_per_row, seed, counter2, counter3, THRESHOLD, BLOCK_KEYS)
            b_dp = tl.where(m_keep, b_dp * KEEP_SCALE, 0.0)
        b_ds = (b_p * (b_dp - delta[:, None])).to(b_k.dtype)
        b_dq = dot(b_ds, b_k, b_dq)
    p_dq += i_batch * stride_dq_batch + first_query * stride_dq + i_head * stride_dq_head
    o_head = tl.arange(0, BLOCK_HEAD)
    m_inside = m_query[:, None] & (o_head < HEAD)[None, :]
    b_dq *= scale * 0.6931471805599453
    tl.store(p_dq + o_query[:, None] * stride_dq + o_head[None, :], b_dq.to(p_dq.dtype.element_ty), mask=m_inside)
