"""Attention forward in Triton: a program has a block of queries of one head and loops over the keys that they see.

One loop goes over all keys. Only tiles with keys that some of the block's queries do not see are masked: with a loop
for each kind of tile, loading ahead would begin anew for each. Scores are s = q k.T * scale * log2(e), so that exp2 is
the exponential. Rotary embedding rotates q and k before (launch.py): many programs read them.

Tiles, of the gradients too: find a program's document, load a tile, mask what queries do not see, drop.

A tile has a head's E columns, and zeros up to the next power of two. Nothing is rotated here: that is done
before and after.

Positions: query i of a document sees keys j <= i + d if causal, where d = keys - queries of the document, so that the
last query sees the last key. With a window w it sees only j > i + d - w, and j < i + d + w if not causal.

Source: Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.launch import LOG2_E, dot, jit, run, target_of, tl
from tpkernels.ops.attention.launch import (
    FORWARD,
    NOT_SPECIALIZED,
    Config,
    Options,
    Rotation,
    Sides,
    Tables,
    are_described,
    config_of,
    constants,
    dropout_numbers,
    num_blocks,
    operand,
    sizes,
)


@jit
def document_of(
    i_block: tl.tensor,
    p_starts: tl.tensor,
    p_other_starts: tl.tensor,
    num_documents: tl.int32,
    length: tl.int32,
    other_length: tl.int32,
    BLOCK: tl.constexpr,
) -> Any:
    """Return where the rows of program i_block are.

    That is (block within the document, first row, number of rows, first row on the other side, number of rows there,
    document), where rows are queries and the other side is keys, or the reverse. The blocks of packed document d begin
    at block start // BLOCK + d, so each document has at least as many blocks as it needs. A program finds its document
    by binary search, and the host does not have to count blocks. Without p_starts, every sequence has `length` rows.
    """
    first = 0
    other_first = 0
    low = 0
    if p_starts is not None:
        high = num_documents
        while high - low > 1:
            middle = (low + high) // 2
            is_before = tl.load(p_starts + middle).to(tl.int32) // BLOCK + middle <= i_block
            low = tl.where(is_before, middle, low)
            high = tl.where(is_before, high, middle)
        first = tl.load(p_starts + low).to(tl.int32)
        length = tl.load(p_starts + low + 1).to(tl.int32) - first
        other_first = tl.load(p_other_starts + low).to(tl.int32)
        other_length = tl.load(p_other_starts + low + 1).to(tl.int32) - other_first
        i_block -= first // BLOCK + low
    return i_block, first, length, other_first, other_length, low


@jit
def load_rows(
    x: tl.tensor,
    i_batch: tl.tensor,
    i_head: tl.tensor,
    i_row: tl.tensor,
    end: tl.tensor,
    stride: tl.int64,
    BY_TMA: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Load BLOCK rows of one head from i_row on; rows from `end` on, and columns beyond the head, are 0.

    x is what launch.operand makes: a descriptor of [B, heads, rows, HEAD], whose sequences end at `end`, or a pointer
    to row 0 of the head.
    """
    if BY_TMA:
        # [BLOCK, BLOCK_HEAD]
        b_x = tl.reshape(x.load([i_batch.to(tl.int32), i_head.to(tl.int32), i_row, 0]), [BLOCK, BLOCK_HEAD])
    else:
        o_row = tl.arange(0, BLOCK)
        o_head = tl.arange(0, BLOCK_HEAD)
        m_inside = (o_row < end - i_row)[:, None] & (o_head < HEAD)[None, :]
        # [BLOCK, BLOCK_HEAD]
        b_x = tl.load(x + i_row * stride + (o_row[:, None] * stride + o_head[None, :]), mask=m_inside, other=0.0)
    return b_x


@jit
def visible(
    o_query: tl.tensor,
    o_key: tl.tensor,
    query_length: tl.tensor,
    key_length: tl.tensor,
    window: tl.int32,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> tl.tensor:
    """Return the mask of the keys that each query sees; o_query and o_key broadcast against each other."""
    last = o_query + (key_length - query_length)
    m_see = (o_key < key_length) & (o_query < query_length)
    if CAUSAL:
        m_see = m_see & (o_key <= last)
    if WINDOWED:
        m_see = m_see & (o_key > last - window)
        if not CAUSAL:
            m_see = m_see & (o_key < last + window)
    return m_see


@jit
def kept(
    row: tl.tensor,
    i_key: tl.tensor,
    groups_per_row: tl.int32,
    seed: tl.int64,
    counter2: tl.int32,
    counter3: tl.int32,
    THRESHOLD: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
) -> tl.tensor:
    """Return dropout's mask [rows, BLOCK_KEYS] of the keys from i_key on, equal to that of dropout.keep_at.

    A Philox call draws the words of four keys, so i_key must be a multiple of 4.
    """
    o_group = i_key // 4 + tl.arange(0, BLOCK_KEYS // 4)
    index = row[:, None] * groups_per_row + o_group[None, :]
    word0, word1, word2, word3 = tl.philox(seed, index.to(tl.uint32), (index >> 32).to(tl.uint32), counter2, counter3)
    word = tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3))
    return word.to(tl.int64) >= THRESHOLD


@jit
def key_range(
    first_query: tl.tensor,
    query_length: tl.tensor,
    key_length: tl.tensor,
    window: tl.int32,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
) -> Any:
    """Return (begin, full_begin, full_end, end) of the keys that a block of queries sees.

    Every query of the block sees all keys from full_begin to full_end. No query sees a key before begin, or one from
    end on. Each of the first three numbers is a multiple of BLOCK_KEYS, or equal to end.
    """
    offset = key_length - query_length
    last_query = tl.minimum(first_query + BLOCK_QUERIES, query_length) - 1
    begin = 0
    full_begin = 0
    end = key_length
    full_end = key_length // BLOCK_KEYS * BLOCK_KEYS
    if CAUSAL:
        end = tl.minimum(end, tl.maximum(last_query + offset + 1, 0))
        full_end = tl.minimum(full_end, tl.maximum(first_query + offset + 1, 0) // BLOCK_KEYS * BLOCK_KEYS)
    if WINDOWED:
        begin = tl.maximum(first_query + offset - window + 1, 0) // BLOCK_KEYS * BLOCK_KEYS
        full_begin = tl.cdiv(tl.maximum(last_query + offset - window + 1, 0), BLOCK_KEYS) * BLOCK_KEYS
        if not CAUSAL:
            end = tl.minimum(end, tl.maximum(last_query + offset + window, 0))
            full_end = tl.minimum(full_end, tl.maximum(first_query + offset + window, 0) // BLOCK_KEYS * BLOCK_KEYS)
    # Rows beyond the document's last query were not counted: their results are not stored, so they need no mask.
    full_begin = tl.maximum(full_begin, begin)
    full_end = tl.maximum(full_end, full_begin)
    return begin, tl.minimum(full_begin, end), tl.minimum(full_end, end), end


@jit
def query_range(
    first_key: tl.tensor,
    query_length: tl.tensor,
    key_length: tl.tensor,
    window: tl.int32,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
) -> Any:
    """Return (begin, full_begin, full_end, end) of the queries that see a block of keys; as `key_range`."""
    offset = key_length - query_length
    last_key = tl.minimum(first_key + BLOCK_KEYS, key_length) - 1
    begin = 0
    full_begin = 0
    end = query_length
    full_end = query_length // BLOCK_QUERIES * BLOCK_QUERIES
    if CAUSAL:
        begin = tl.maximum(first_key - offset, 0) // BLOCK_QUERIES * BLOCK_QUERIES
        full_begin = tl.cdiv(tl.maximum(last_key - offset, 0), BLOCK_QUERIES) * BLOCK_QUERIES
    if WINDOWED:
        end = tl.minimum(end, tl.maximum(last_key - offset + window, 0))
        full_end = tl.minimum(full_end, tl.maximum(first_key - offset + window, 0) // BLOCK_QUERIES * BLOCK_QUERIES)
        if not CAUSAL:
            begin = tl.maximum(first_key - offset - window + 1, 0) // BLOCK_QUERIES * BLOCK_QUERIES
            full_begin = tl.cdiv(tl.maximum(last_key - offset - window + 1, 0), BLOCK_QUERIES) * BLOCK_QUERIES
    begin = tl.minimum(begin, end)
    full_begin = tl.maximum(full_begin, begin)
    if not CAUSAL:
        # Keys beyond the document's last need a mask: dq adds up over them. Causal blocks with such keys have no tile
        # that is full.
        full_begin = tl.where(first_key + BLOCK_KEYS > key_length, end, full_begin)
    full_end = tl.maximum(full_end, full_begin)
    return begin, tl.minimum(full_begin, end), tl.minimum(full_end, end), end


@jit(do_not_specialize=NOT_SPECIALIZED)
def _attention_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
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
    """Compute y and lse of one block of queries of one head per program.

    y is [B, num_queries, num_heads, HEAD], and lse is [B, num_heads, num_queries].
    """
    # The last blocks of a causal document have the most work, so they start first.
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
    if not BY_TMA:
        q += i_batch * stride_q_batch + first_query * stride_q + i_head * stride_q_head
        k += i_batch * stride_k_batch + first_key * stride_k + i_group * stride_k_head
        v += i_batch * stride_v_batch + first_key * stride_v + i_group * stride_v_head
    # [BLOCK_QUERIES, BLOCK_HEAD]
    b_q = load_rows(
        q, i_batch, i_head, i_block * BLOCK_QUERIES, query_length, stride_q, BY_TMA, HEAD, BLOCK_HEAD, BLOCK_QUERIES
    )
    row = (i_batch * num_row_heads + first_row_head + i_head) * num_queries + first_query + o_query
    b_y = tl.zeros([BLOCK_QUERIES, BLOCK_HEAD], tl.float32)
    b_max = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_QUERIES], tl.float32)
    begin, full_begin, full_end, end = key_range(
        i_block * BLOCK_QUERIES, query_length, key_length, window, CAUSAL, WINDOWED, BLOCK_QUERIES, BLOCK_KEYS
    )
    for i_key in tl.range(begin, end, BLOCK_KEYS):
        # [BLOCK_KEYS, BLOCK_HEAD]
        b_k = load_rows(k, i_batch, i_group, i_key, key_length, stride_k, BY_TMA, HEAD, BLOCK_HEAD, BLOCK_KEYS)
        b_s = dot(b_q, tl.trans(b_k), tl.zeros([BLOCK_QUERIES, BLOCK_KEYS], tl.float32))
        if (i_key < full_begin) | (i_key >= full_end):
            o_key = i_key + tl.arange(0, BLOCK_KEYS)
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
        # [BLOCK_KEYS, BLOCK_HEAD]
        b_v = load_rows(v, i_batch, i_group, i_key, key_length, stride_v, BY_TMA, HEAD, BLOCK_HEAD, BLOCK_KEYS)
        b_y = dot(b_p.to(b_v.dtype), b_v, b_y * shrink[:, None])
    # A query that sees no key has y = 0 and lse = -inf.
    b_y = b_y * (KEEP_SCALE / tl.where(b_sum == 0.0, 1.0, b_sum))[:, None]
    lse = (b_max + tl.log2(b_sum)) * 0.6931471805599453
    i_query = first_query + o_query
    o_head = tl.arange(0, BLOCK_HEAD)
    o_y = ((i_batch * num_queries + i_query) * num_heads + i_head)[:, None] * HEAD + o_head[None, :]
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_query[:, None] & (o_head < HEAD)[None, :])
    tl.store(p_lse + (i_batch * num_heads + i_head) * num_queries + i_query, lse, mask=m_query)


def launch_attention(
    q: Tensor, k: Tensor, v: Tensor, tables: Tables, sides: Sides, options: Options, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """Return (y [B, S, H, E], lse [B, H, S]) for q[B, S, H, E], k and v[B, S', G, E] without gaps in the last dims.

    `config` is for measuring; default launch.py's.
    """
    if tables.cos is not None:
        rotation = Rotation(k, tables, sides, options)
        q, k = rotation.forth(q), rotation.forth(k)
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    meta = constants(q, k, options)
    config = config or config_of(FORWARD, meta["BLOCK_HEAD"], q.element_size(), options.rate > 0, target_of(q))
    described = are_described(target_of(q), sides, q, k, v)
    run(
        _attention_kernel,
        (num_blocks(q.shape[1], sides.query_starts, config.block_queries), q.shape[2], q.shape[0]),
        operand(q, config.block_queries, meta["BLOCK_HEAD"], described),
        operand(k, config.block_keys, meta["BLOCK_HEAD"], described),
        operand(v, config.block_keys, meta["BLOCK_HEAD"], described),
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
        BY_TMA=described,
        **meta,
        **config.options,
    )
    return y, lse
