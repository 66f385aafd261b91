"""The Triton kernel of prepare_heads, and its launcher: operator.py has the equations."""

from __future__ import annotations

from torch import Tensor

from tpkernels.launch import cdiv, jit, only_if, run, tl
from tpkernels.ops.attention.prepare.tiles import (
    NOT_SPECIALIZED,
    Heads,
    Rotary,
    Weights,
    constants_of,
    groups_of,
    load_pairs,
    load_rest,
    load_rest_weights,
    load_tables,
    load_weights,
    store_pairs,
    store_rest,
)


@jit
def _prepare_heads(
    p_x: tl.tensor,
    p_y: tl.tensor,
    p_weight: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    p_positions: tl.tensor,
    o_token: tl.tensor,
    o_y: tl.tensor,
    m_token: tl.tensor,
    seq: tl.int64,
    num_positions: tl.int64,
    first_head: tl.tensor,
    num_heads: tl.int32,
    stride_x: tl.int64,
    stride_y_head: tl.int64,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    PAIRED: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NUM_HEADS_PER_PROGRAM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    """Norm and rotate some heads of some tokens of one part, q, k or v; without weights and tables copy them."""
    if p_cos is not None:
        b_cos, b_sin = load_tables(p_cos, p_sin, p_positions, o_token, m_token, seq, num_positions, PAIRED, BLOCK_PAIRS)
    for i in range(NUM_HEADS_PER_PROGRAM):
        i_head = (first_head + i).to(tl.int64)
        m_row = only_if(i_head < num_heads, m_token)
        o_x = o_token * stride_x + i_head * (PAIRED + REST)
        o_row = o_y + i_head * stride_y_head
        b_first, b_second = load_pairs(p_x, o_x, m_row, PAIRED, INTERLEAVED, BLOCK_TOKENS, BLOCK_PAIRS)
        if REST > 0:
            b_rest = load_rest(p_x, o_x, m_row, PAIRED, REST, BLOCK_REST)
        if p_weight is not None:
            squares = tl.sum(b_first * b_first + b_second * b_second, axis=1)
            if REST > 0:
                squares += tl.sum(b_rest * b_rest, axis=1)
            rstd = tl.rsqrt(squares / (PAIRED + REST) + EPS)[:, None]
            w_first, w_second = load_weights(p_weight, OFFSET, PAIRED, INTERLEAVED, BLOCK_PAIRS)
            b_first *= rstd * w_first[None, :]
            b_second *= rstd * w_second[None, :]
            if REST > 0:
                b_rest *= rstd * load_rest_weights(p_weight, OFFSET, PAIRED, REST, BLOCK_REST)[None, :]
        if p_cos is not None:
            b_turned = b_first * b_cos - b_second * b_sin
            b_second = b_second * b_cos + b_first * b_sin
            b_first = b_turned
        store_pairs(p_y, o_row, m_row, b_first, b_second, PAIRED, INTERLEAVED, BLOCK_PAIRS)
        if REST > 0:
            store_rest(p_y, o_row, m_row, b_rest, PAIRED, REST, BLOCK_REST)


@jit(do_not_specialize=NOT_SPECIALIZED)
def _prepare_heads_kernel(
    p_qkv: tl.tensor,
    p_q: tl.tensor,
    p_k: tl.tensor,
    p_v: tl.tensor,
    p_q_weight: tl.tensor,
    p_k_weight: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    p_positions: tl.tensor,
    num_tokens: tl.int64,
    seq: tl.int64,
    num_positions: tl.int64,
    num_heads: tl.int32,
    num_kv_heads: tl.int32,
    stride_qkv: tl.int64,
    stride_q_batch: tl.int64,
    stride_q: tl.int64,
    stride_q_head: tl.int64,
    stride_k_batch: tl.int64,
    stride_k: tl.int64,
    stride_k_head: tl.int64,
    stride_v_batch: tl.int64,
    stride_v: tl.int64,
    stride_v_head: tl.int64,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    PAIRED: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NUM_HEADS_PER_PROGRAM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    """Write NUM_HEADS_PER_PROGRAM heads of BLOCK_TOKENS tokens of q, k or v per program; p_v may be None."""
    o_token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    m_token = o_token < num_tokens
    i_batch, i_place = o_token // seq, o_token % seq
    i_group = tl.program_id(1)
    q_groups, k_groups = tl.cdiv(num_heads, NUM_HEADS_PER_PROGRAM), tl.cdiv(num_kv_heads, NUM_HEADS_PER_PROGRAM)
    p_keys = p_qkv + num_heads * (PAIRED + REST)
    if i_group < q_groups:
        _prepare_heads(
            p_qkv,
            p_q,
            p_q_weight,
            p_cos,
            p_sin,
            p_positions,
            o_token,
            i_batch * stride_q_batch + i_place * stride_q,
            m_token,
            seq,
            num_positions,
            i_group * NUM_HEADS_PER_PROGRAM,
            num_heads,
            stride_qkv,
            stride_q_head,
            EPS,
            OFFSET,
            PAIRED,
            REST,
            INTERLEAVED,
            NUM_HEADS_PER_PROGRAM,
            BLOCK_TOKENS,
            BLOCK_PAIRS,
            BLOCK_REST,
        )
    elif i_group < q_groups + k_groups:
        _prepare_heads(
            p_keys,
            p_k,
            p_k_weight,
            p_cos,
            p_sin,
            p_positions,
            o_token,
            i_batch * stride_k_batch + i_place * stride_k,
            m_token,
            seq,
            num_positions,
            (i_group - q_groups) * NUM_HEADS_PER_PROGRAM,
            num_kv_heads,
            stride_qkv,
            stride_k_head,
            EPS,
            OFFSET,
            PAIRED,
            REST,
            INTERLEAVED,
            NUM_HEADS_PER_PROGRAM,
            BLOCK_TOKENS,
            BLOCK_PAIRS,
            BLOCK_REST,
        )
    elif p_v is not None:
        _prepare_heads(
            p_keys + num_kv_heads * (PAIRED + REST),
            p_v,
            None,
            None,
            None,
            None,
            o_token,
            i_batch * stride_v_batch + i_place * stride_v,
            m_token,
            seq,
            num_positions,
            (i_group - q_groups - k_groups) * NUM_HEADS_PER_PROGRAM,
            num_kv_heads,
            stride_qkv,
            stride_v_head,
            EPS,
            OFFSET,
            PAIRED,
            REST,
            INTERLEAVED,
            NUM_HEADS_PER_PROGRAM,
            BLOCK_TOKENS,
            BLOCK_PAIRS,
            BLOCK_REST,
        )


def launch_prepare(
    qkv: Tensor, heads: Heads, rotary: Rotary, weights: Weights, *, copies_v: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run the operator tpkernels::prepare_heads with its kernel; without copies_v leave v out."""
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    q, k = heads.empty(qkv, heads.num_heads), heads.empty(qkv, heads.num_kv_heads)
    v = heads.empty(qkv, heads.num_kv_heads) if copies_v else None
    constants = constants_of(heads, q.shape[3], rotary, qkv.element_size(), 1024)
    groups = groups_of(heads.num_heads) + (1 + copies_v) * groups_of(heads.num_kv_heads)
    run(
        _prepare_heads_kernel,
        (cdiv(qkv.shape[0], constants["BLOCK_TOKENS"]), groups),
        qkv,
        q,
        k,
        v,
        *weights.dense(),
        *rotary,
        qkv.shape[0],
        q.shape[1],
        0 if rotary.cos is None else rotary.cos.shape[0],
        heads.num_heads,
        heads.num_kv_heads,
        qkv.stride(0),
        *q.stride()[:3],
        *k.stride()[:3],
        *(k if v is None else v).stride()[:3],
        **constants,
    )
    return q, k, v
