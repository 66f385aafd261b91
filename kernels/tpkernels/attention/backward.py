"""Attention backward in Triton: a kernel for dq, one for dk and dv, no atomics.

    p = exp2(s - lse * log2(e));   ds = p * (drop(dy v.T) - delta),  delta = sum(dy * y)
    dv = drop(p).T dy;   dk = ds.T q * scale;   dq = ds k * scale

A program of dq has a block of queries of one head and walks over keys; one of dk and dv has a block of keys of one KV
head and walks over queries, of all query heads of its group or of a part of them. So every element is written by one
program, in an order that the shapes alone decide. The price: scores are computed twice, 7 products instead of 5.

Source: Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.attention.configs import KEY_GRADIENT, KEY_GRADIENT_OF_SEVERAL, QUERY_GRADIENT, config_of
from tpkernels.attention.problem import (
    NOT_SPECIALIZED,
    Options,
    Sides,
    Tables,
    constants,
    dropout_numbers,
    num_blocks,
    sizes,
)
from tpkernels.attention.tiles import document_of, kept, key_range, load_halves, query_range, store_halves, visible
from tpkernels.launch import LOG2_E, cdiv, dot, jit, power_of_2, run, target_of, tl

# Programs that keep every processor of today's largest GPUs busy. Fewer, and a group's query heads are divided.
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
    """y, contiguous [B, rows, num_heads, HEAD], is x rotated; x are keys, or queries, which end where the keys do."""
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
    """delta [B, num_heads, num_queries] = sum(dy * y), y contiguous [B, num_queries, num_heads, HEAD]."""
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


@jit
def _add_key_gradients(
    dk_low: tl.tensor,
    dk_high: tl.tensor,
    b_dv: tl.tensor,
    k_low: tl.tensor,
    k_high: tl.tensor,
    b_v: tl.tensor,
    p_q: tl.tensor,
    p_dy: tl.tensor,
    p_lse: tl.tensor,
    p_delta: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    i_key: tl.tensor,
    query_length: tl.tensor,
    key_length: tl.tensor,
    stride_q: tl.int64,
    stride_dy: tl.int64,
    scale: tl.float32,
    window: tl.int32,
    first_row: tl.tensor,
    groups_a_row: tl.int32,
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
    """Add what the queries from begin to end give to a block of keys; tiles are [keys, queries]."""
    o_key = i_key + tl.arange(0, BLOCK_KEYS)
    o_head = tl.arange(0, 2 * HALF)
    for i_query in tl.range(begin, end, BLOCK_QUERIES):
        o_query = i_query + tl.arange(0, BLOCK_QUERIES)
        m_query = o_query < query_length
        q_low, q_high = load_halves(p_q, o_query, m_query, stride_q, None, None, o_query, HEAD, HALF, INTERLEAVED)
        b_s = dot(k_low, tl.trans(q_low), tl.zeros([BLOCK_KEYS, BLOCK_QUERIES], tl.float32))
        b_s = dot(k_high, tl.trans(q_high), b_s) * scale
        # [BLOCK_QUERIES]
        lse = tl.load(p_lse + o_query, mask=m_query, other=0.0) * 1.4426950408889634
        if MASKED:
            m_see = visible(o_query[None, :], o_key[:, None], query_length, key_length, window, CAUSAL, WINDOWED)
            # A query that sees no key has lse = -inf, and is seen by none.
            b_p = tl.where(m_see, tl.exp2(b_s - tl.where(lse == float("-inf"), 0.0, lse)[None, :]), 0.0)
        else:
            b_p = tl.exp2(b_s - lse[None, :])
        # [BLOCK_QUERIES, 2 * HALF]
        b_dy = tl.load(
            p_dy + o_query[:, None] * stride_dy + o_head[None, :],
            mask=m_query[:, None] & (o_head < HEAD)[None, :],
            other=0.0,
        )
        b_dp = dot(b_v, tl.trans(b_dy), tl.zeros([BLOCK_KEYS, BLOCK_QUERIES], tl.float32))
        if THRESHOLD > 0:
            row = first_row + o_query
            m_keep = tl.trans(kept(row, i_key, groups_a_row, seed, counter2, counter3, THRESHOLD, BLOCK_KEYS))
            b_dv = dot(tl.where(m_keep, b_p * KEEP_SCALE, 0.0).to(b_dy.dtype), b_dy, b_dv)
            b_dp = tl.where(m_keep, b_dp * KEEP_SCALE, 0.0)
        else:
            b_dv = dot(b_p.to(b_dy.dtype), b_dy, b_dv)
        # [BLOCK_QUERIES]
        delta = tl.load(p_delta + o_query, mask=m_query, other=0.0)
        b_ds = (b_p * (b_dp - delta[None, :])).to(q_low.dtype)
        dk_low = dot(b_ds, q_low, dk_low)
        dk_high = dot(b_ds, q_high, dk_high)
    return dk_low, dk_high, b_dv


@jit(do_not_specialize=NOT_SPECIALIZED)
def _key_gradient_kernel(
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
    groups_a_row: tl.int32,
    first_row_head: tl.int32,
    num_row_heads: tl.int32,
    seed: tl.int64,
    counter2: tl.int32,
    counter3: tl.int32,
    NUM_SLOTS: tl.constexpr,
    HEADS_A_GROUP: tl.constexpr,
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
    """dk and dv of a block of keys of one KV head, from the query heads of one of its group's NUM_SLOTS parts."""
    i_group, i_slot = (tl.program_id(1) // NUM_SLOTS).to(tl.int64), (tl.program_id(1) % NUM_SLOTS).to(tl.int64)
    i_batch = tl.program_id(2).to(tl.int64)
    i_block, first_key, key_length, first_query, query_length = document_of(
        tl.program_id(0), p_key_starts, p_query_starts, num_documents, key_length, query_length, BLOCK_KEYS
    )
    i_key = i_block * BLOCK_KEYS
    if i_key >= key_length:
        return
    o_key = i_key + tl.arange(0, BLOCK_KEYS)
    m_key = o_key < key_length
    o_head = tl.arange(0, 2 * HALF)
    m_inside = m_key[:, None] & (o_head < HEAD)[None, :]
    p_k += i_batch * stride_k_batch + first_key * stride_k + i_group * stride_k_head
    p_v += i_batch * stride_v_batch + first_key * stride_v + i_group * stride_v_head
    k_low, k_high = load_halves(p_k, o_key, m_key, stride_k, None, None, o_key, HEAD, HALF, INTERLEAVED)
    # [BLOCK_KEYS, 2 * HALF]
    b_v = tl.load(p_v + o_key[:, None] * stride_v + o_head[None, :], mask=m_inside, other=0.0)
    dk_low = tl.zeros([BLOCK_KEYS, HALF], tl.float32)
    dk_high = tl.zeros([BLOCK_KEYS, HALF], tl.float32)
    b_dv = tl.zeros([BLOCK_KEYS, 2 * HALF], tl.float32)
    begin, full_begin, full_end, end = query_range(
        i_key, query_length, key_length, window, CAUSAL, WINDOWED, BLOCK_QUERIES, BLOCK_KEYS
    )
    HEADS_A_SLOT: tl.constexpr = HEADS_A_GROUP // NUM_SLOTS
    for i_member in range(0, HEADS_A_SLOT):
        i_head = i_group * HEADS_A_GROUP + i_slot * HEADS_A_SLOT + i_member
        o_statistics = (i_batch * num_heads + i_head) * num_queries + first_query
        first_row = (i_batch * num_row_heads + first_row_head + i_head) * num_queries + first_query
        for PART in tl.static_range(0, 3):
            if PART == 0:
                part_begin, part_end = begin, full_begin
            elif PART == 1:
                part_begin, part_end = full_begin, full_end
            else:
                part_begin, part_end = full_end, end
            dk_low, dk_high, b_dv = _add_key_gradients(
                dk_low,
                dk_high,
                b_dv,
                k_low,
                k_high,
                b_v,
                p_q + i_batch * stride_q_batch + first_query * stride_q + i_head * stride_q_head,
                p_dy + i_batch * stride_dy_batch + first_query * stride_dy + i_head * stride_dy_head,
                p_lse + o_statistics,
                p_delta + o_statistics,
                part_begin,
                part_end,
                i_key,
                query_length,
                key_length,
                stride_q,
                stride_dy,
                scale,
                window,
                first_row,
                groups_a_row,
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
    to_dk = scale * 0.6931471805599453
    p_dk += i_slot * stride_d_slot + i_batch * stride_dk_batch + first_key * stride_dk + i_group * stride_dk_head
    store_halves(
        p_dk,
        o_key,
        m_key,
        stride_dk,
        dk_low * to_dk,
        dk_high * to_dk,
        p_cos,
        p_sin,
        o_key,
        HEAD,
        HALF,
        INTERLEAVED,
    )
    p_dv += i_slot * stride_d_slot + i_batch * stride_dv_batch + first_key * stride_dv + i_group * stride_dv_head
    o_dv = o_key[:, None] * stride_dv + o_head[None, :]
    tl.store(p_dv + o_dv, b_dv.to(p_dv.dtype.element_ty), mask=m_inside)


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
    groups_a_row: tl.int32,
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
    """Add what the keys from begin to end give to a block of queries."""
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
            m_keep = kept(row, i_key, groups_a_row, seed, counter2, counter3, THRESHOLD, BLOCK_KEYS)
            b_dp = tl.where(m_keep, b_dp * KEEP_SCALE, 0.0)
        b_ds = (b_p * (b_dp - delta[:, None])).to(k_low.dtype)
        dq_low = dot(b_ds, k_low, dq_low)
        dq_high = dot(b_ds, k_high, dq_high)
    return dq_low, dq_high


@jit(do_not_specialize=NOT_SPECIALIZED)
def _query_gradient_kernel(
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
    groups_a_row: tl.int32,
    first_row_head: tl.int32,
    num_row_heads: tl.int32,
    seed: tl.int64,
    counter2: tl.int32,
    counter3: tl.int32,
    HEADS_A_GROUP: tl.constexpr,
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
    """dq of a block of queries of one head."""
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
    i_group = i_head // HEADS_A_GROUP
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
            groups_a_row,
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
    """Write dq, dk, dv into `gradients`, of the shapes of q, k, v, whose last dims have no gaps."""
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
        _query_gradient_kernel,
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
    num_slots = _num_slots(blocks * k.shape[2] * batch, meta["HEADS_A_GROUP"])
    if num_slots < meta["HEADS_A_GROUP"]:
        config = config_of(KEY_GRADIENT_OF_SEVERAL, *kind)
    parts: Sequence[Tensor] = (dk, dv)
    if num_slots > 1:
        parts = tuple(torch.empty(num_slots, *of.shape, dtype=torch.float32, device=of.device) for of in (dk, dv))
    run(
        _key_gradient_kernel,
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
    """x[B, S, heads, E] rotated: what the loops read once for every block of the other side is not rotated there."""
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


def _num_slots(num_programs: int, heads_a_group: int) -> int:
    """Parts that a group's query heads are divided into, so that there is a program for every processor.

    A function of shapes alone, so that the order of sums is; each part costs a float32 copy of dk and dv.
    """
    slots = 1
    while num_programs * slots < _ENOUGH_PROGRAMS and heads_a_group % (2 * slots) == 0:
        slots *= 2
    return slots
