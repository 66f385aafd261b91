"""Gradients of attention in Triton: a program has a block of keys and loops over the queries that see it.

    dv = drop(p).T dy;   dk = ds.T q * scale          in registers, of some query heads of a KV head
    dq += ds k                                        in memory, in float32, block of keys by block of keys; or not here

dq is added up in the order of the blocks of keys (turns, below): the same bits in every run. For each block of keys a
tile of dq goes to the L2 cache, and the adds are done there, while the next tile is multiplied. Where that leaves
registers for small blocks only (launch.py), query_gradient_kernel computes dq: there a program has queries, and loops
over their keys.

Turns: programs of one launch add to the same tile one after another, in an order that depends on shapes only.

A tile has a counter, 0 before the launch. Whoever adds as number n waits until n have passed the turn on, adds, and
passes it on in turn:

    i_item = claim(p_claims)            which of the launch's items this program has
    if the_launch_has_work:             keeps the next three in order, behind the products (see below)
        await_turn(p_counter, n, ...)       what was added before is there
        atomic_add(p_tile, ...)             each element once
        pass_turn(p_counter, ...)           what this program has added before is there

Why it always goes on: items are numbered so that one waits only for lower ones, and programs claim numbers when they
begin to run. So whatever a program waits for is finished, or belongs to a program that runs; the one with the lowest
number waits for nobody. A GPU promises no order in which the programs of a grid begin, so their ids would not do.

Triton loads ahead in no loop that has a barrier or a loop inside. So on NVIDIA's GPUs each thread waits by itself, in
PTX, and each warp passes the turn on by itself: a turn counts as many arrivals as a program has warps. Elsewhere one
thread does both for all, behind a barrier. Where triton loads ahead it also reorders what does not depend on each
other, but nothing within a condition. The interpreter runs programs in order: there the turn must have come.

Source: Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2; Shah et al., "FlashAttention-3", arXiv 2407.08608 (its
deterministic backward takes turns too).
"""

from __future__ import annotations

from typing import Any

from tpkernels.launch import INTERPRETED, Target, dot, jit, tl
from tpkernels.ops.attention.forward import document_of, kept, key_range, load_rows, query_range, visible
from tpkernels.ops.attention.launch import NOT_SPECIALIZED

if tl is not None:
    _INTERPRETED = tl.constexpr(INTERPRETED)


def arrivals_per_turn(target: Target, num_warps: int) -> int:
    """Return how many arrivals pass a turn on: ARRIVALS of the kernels; 1 where one thread speaks for all."""
    return num_warps if target.backend == "cuda" and not INTERPRETED else 1


@jit
def claim(p_claims: tl.tensor) -> tl.tensor:
    """Return how many programs have claimed before this one."""
    return tl.atomic_add(p_claims, 1, sem="relaxed", scope="gpu")


@jit
def await_turn(p_counter: tl.tensor, turn: tl.tensor, ARRIVALS: tl.constexpr) -> None:
    """Wait until `turn` programs have passed the turn on."""
    if _INTERPRETED:
        assert tl.load(p_counter) == turn, "programs that run in order find that their turn has come"
    elif ARRIVALS > 1:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred early;
            await_turn:
            ld.acquire.gpu.global.s32 $0, [$1];
            setp.lt.s32 early, $0, $2;
            @early bra await_turn;
            bar.warp.sync 0xffffffff;
            }
            """,
            "=&r,l,r",
            [p_counter, turn * ARRIVALS],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        while tl.atomic_add(p_counter, 0, sem="acquire", scope="gpu") < turn:
            pass


@jit
def pass_turn(p_counter: tl.tensor, ARRIVALS: tl.constexpr) -> None:
    """Pass the turn on, and with it all that this program has added."""
    if ARRIVALS > 1:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred first;
            mov.u32 $0, %laneid;
            setp.eq.u32 first, $0, 0;
            bar.warp.sync 0xffffffff;
            @first red.release.gpu.global.add.s32 [$1], 1;
            }
            """,
            "=&r,l",
            [p_counter],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.debug_barrier()
        tl.atomic_add(p_counter, 1, sem="release", scope="gpu")


@jit
def _place(i_item: tl.tensor, num_blocks: tl.int32, num_columns: tl.int32, columns_at_a_time: tl.int32) -> Any:
    """Return the block and the column of an item: block by block of some columns, then the next columns.

    Of columns at a time there are so many that a program rarely waits for the one before it in its column, and so few
    that their q, dy and dq stay in the L2 cache.
    """
    items_at_a_time = num_blocks * columns_at_a_time
    first_column = i_item // items_at_a_time * columns_at_a_time
    width = min(num_columns - first_column, columns_at_a_time)
    within = i_item % items_at_a_time
    return within // width, first_column + within % width


@jit(do_not_specialize=[*NOT_SPECIALIZED, "num_blocks", "num_tiles", "num_columns", "columns_at_a_time"])
def gradient_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    dy: tl.tensor,
    p_query_starts: tl.tensor,
    p_key_starts: tl.tensor,
    p_lse: tl.tensor,
    p_delta: tl.tensor,
    p_counters: tl.tensor,
    p_dq: tl.tensor,
    p_dk: tl.tensor,
    p_dv: tl.tensor,
    num_documents: tl.int32,
    query_length: tl.int32,
    key_length: tl.int32,
    num_queries: tl.int32,
    num_heads: tl.int32,
    num_blocks: tl.int32,
    num_tiles: tl.int32,
    num_columns: tl.int32,
    columns_at_a_time: tl.int32,
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
    BY_TMA: tl.constexpr,
    ADDS_DQ: tl.constexpr,
    ARRIVALS: tl.constexpr,
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
    """Compute dk and dv of one block of keys of some query heads of a group per program, and add its share to their dq.

    A group's query heads are divided into NUM_SLOTS parts, each with a copy of dk and dv; a part is a column of items,
    an item for each block of keys. With ADDS_DQ, dq, float32 [B, num_heads, num_queries, HEAD], is 0 before and without
    the scale after; p_counters are 0 before: the claims, one for nobody, then [B, num_heads, num_tiles].
    """
    i_item = claim(p_counters) if ADDS_DQ else tl.program_id(0)
    i_block, i_column = _place(i_item, num_blocks, num_columns, columns_at_a_time)
    num_groups = num_heads // NUM_HEADS_PER_GROUP
    i_slot = (i_column % NUM_SLOTS).to(tl.int64)
    i_group = (i_column // NUM_SLOTS % num_groups).to(tl.int64)
    i_batch = (i_column // NUM_SLOTS // num_groups).to(tl.int64)
    i_block, first_key, key_length, first_query, query_length, i_document = document_of(
        i_block, p_key_starts, p_query_starts, num_documents, key_length, query_length, BLOCK_KEYS
    )
    i_key = i_block * BLOCK_KEYS
    if i_key >= key_length:
        return
    o_key = i_key + tl.arange(0, BLOCK_KEYS)
    o_head = tl.arange(0, BLOCK_HEAD)
    if not BY_TMA:
        q += i_batch * stride_q_batch + first_query * stride_q
        dy += i_batch * stride_dy_batch + first_query * stride_dy
        k += i_batch * stride_k_batch + first_key * stride_k + i_group * stride_k_head
        v += i_batch * stride_v_batch + first_key * stride_v + i_group * stride_v_head
    # [BLOCK_KEYS, BLOCK_HEAD]
    b_k = load_rows(k, i_batch, i_group, i_key, key_length, stride_k, BY_TMA, HEAD, BLOCK_HEAD, BLOCK_KEYS)
    # [BLOCK_KEYS, BLOCK_HEAD]
    b_v = load_rows(v, i_batch, i_group, i_key, key_length, stride_v, BY_TMA, HEAD, BLOCK_HEAD, BLOCK_KEYS)
    b_dk = tl.zeros([BLOCK_KEYS, BLOCK_HEAD], tl.float32)
    b_dv = tl.zeros([BLOCK_KEYS, BLOCK_HEAD], tl.float32)
    begin, full_begin, full_end, end = query_range(
        i_key, query_length, key_length, window, CAUSAL, WINDOWED, BLOCK_QUERIES, BLOCK_KEYS
    )
    num_seeing = tl.cdiv(end - begin, BLOCK_QUERIES)
    first_tile = first_query // BLOCK_QUERIES + i_document
    if ADDS_DQ:
        # Nobody's counter, then that of the tile before.
        p_passed = p_counters + 1
    NUM_HEADS_PER_SLOT: tl.constexpr = NUM_HEADS_PER_GROUP // NUM_SLOTS
    for i_member in range(0, NUM_HEADS_PER_SLOT):
        i_head = i_group * NUM_HEADS_PER_GROUP + i_slot * NUM_HEADS_PER_SLOT + i_member
        o_statistics = (i_batch * num_heads + i_head) * num_queries + first_query
        first_row = (i_batch * num_row_heads + first_row_head + i_head) * num_queries + first_query
        head_q = q if BY_TMA else q + i_head * stride_q_head
        head_dy = dy if BY_TMA else dy + i_head * stride_dy_head
        if ADDS_DQ:
            p_turns = p_counters + 2 + (i_batch * num_heads + i_head) * num_tiles + first_tile
        # From the last query back: of a causal column all blocks then end at one time, and none waits for long.
        for i_seeing in tl.range(0, num_seeing):
            i_query = begin + (num_seeing - 1 - i_seeing) * BLOCK_QUERIES
            o_query = i_query + tl.arange(0, BLOCK_QUERIES)
            m_query = o_query < query_length
            # [BLOCK_QUERIES, BLOCK_HEAD]
            b_q = load_rows(
                head_q, i_batch, i_head, i_query, query_length, stride_q, BY_TMA, HEAD, BLOCK_HEAD, BLOCK_QUERIES
            )
            b_s = dot(b_k, tl.trans(b_q), tl.zeros([BLOCK_KEYS, BLOCK_QUERIES], tl.float32)) * scale
            # [BLOCK_QUERIES]
            lse = tl.load(p_lse + o_statistics + o_query, mask=m_query, other=0.0) * 1.4426950408889634
            # A query that sees no key has lse = -inf; its p is masked, but -inf - -inf would be NaN.
            b_p = tl.exp2(b_s - tl.where(lse == float("-inf"), 0.0, lse)[None, :])
            if (i_query < full_begin) | (i_query >= full_end):
                m_see = visible(o_query[None, :], o_key[:, None], query_length, key_length, window, CAUSAL, WINDOWED)
                b_p = tl.where(m_see, b_p, 0.0)
            # [BLOCK_QUERIES, BLOCK_HEAD]
            b_dy = load_rows(
                head_dy, i_batch, i_head, i_query, query_length, stride_dy, BY_TMA, HEAD, BLOCK_HEAD, BLOCK_QUERIES
            )
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
            if ADDS_DQ:
                # With keys as the left operand a warp keeps only some columns of them, where registers hold operands.
                b_dq = tl.trans(dot(tl.trans(b_k), b_ds, tl.zeros([BLOCK_HEAD, BLOCK_QUERIES], tl.float32)))
                turn = i_block
                if WINDOWED:
                    # Earlier blocks, whose last key none of the tile's queries sees, do not come.
                    turn -= tl.maximum(i_query + (key_length - query_length) - window + 1, 0) // BLOCK_KEYS
                if num_queries > 0:
                    # Passed on only now, what was added to the tile before has arrived, and nobody waits for that.
                    pass_turn(p_passed, ARRIVALS)
                    await_turn(p_turns + i_query // BLOCK_QUERIES, turn, ARRIVALS)
                    # Offsets that are constants need no registers.
                    o_dq = tl.arange(0, BLOCK_QUERIES)[:, None] * HEAD + o_head[None, :]
                    m_dq = m_query[:, None] & (o_head < HEAD)[None, :]
                    p_tile = p_dq + (o_statistics + i_query) * HEAD
                    tl.atomic_add(p_tile + o_dq, b_dq, mask=m_dq, sem="relaxed", scope="gpu")
                p_passed = p_turns + i_query // BLOCK_QUERIES
    if ADDS_DQ:
        pass_turn(p_passed, ARRIVALS)
    m_inside = (o_key < key_length)[:, None] & (o_head < HEAD)[None, :]
    p_dk += i_slot * stride_d_slot + i_batch * stride_dk_batch + first_key * stride_dk + i_group * stride_dk_head
    b_dk *= scale * 0.6931471805599453
    tl.store(p_dk + o_key[:, None] * stride_dk + o_head[None, :], b_dk.to(p_dk.dtype.element_ty), mask=m_inside)
    p_dv += i_slot * stride_d_slot + i_batch * stride_dv_batch + first_key * stride_dv + i_group * stride_dv_head
    tl.store(p_dv + o_key[:, None] * stride_dv + o_head[None, :], b_dv.to(p_dv.dtype.element_ty), mask=m_inside)


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
