"""Tiles of attention: find a program's document, load a tile, mask what queries do not see, drop.

A tile has a head's E columns, and zeros up to the next power of two. Nothing is rotated here: rotation.py does that
before and after.

Positions: query i of a document sees keys j <= i + d if causal, where d = keys - queries of the document, so that the
last query sees the last key. With a window w it sees only j > i + d - w, and j < i + d + w if not causal.
"""

from __future__ import annotations

from typing import Any

from tpkernels.launch import jit, tl


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

    x is what operands.py makes: a descriptor of [B, heads, rows, HEAD], whose sequences end at `end`, or a pointer to
    row 0 of the head.
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
