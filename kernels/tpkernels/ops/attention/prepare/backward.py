"""The Triton kernel of prepare_heads' gradient, and its launcher: operator.py has the equations."""

from __future__ import annotations

import torch
from torch import Tensor

from tpkernels.launch import accumulation_dtype, cdiv, jit, only_if, run, tl
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
def _prepare_heads_backward(
    p_dy: tl.tensor,
    p_x: tl.tensor,
    p_dx: tl.tensor,
    p_weight: tl.tensor,
    p_part: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    p_positions: tl.tensor,
    o_token: tl.tensor,
    o_dy: tl.tensor,
    m_token: tl.tensor,
    seq: tl.int64,
    num_positions: tl.int64,
    first_head: tl.tensor,
    num_heads: tl.int32,
    stride_x: tl.int64,
    stride_dx: tl.int64,
    stride_dy_head: tl.int64,
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
    """Write dx of some heads of some tokens of one part, and with weights p_part[E], their share of the gradient."""
    if p_cos is not None:
        b_cos, b_sin = load_tables(p_cos, p_sin, p_positions, o_token, m_token, seq, num_positions, PAIRED, BLOCK_PAIRS)
    if p_weight is not None:
        w_first, w_second = load_weights(p_weight, OFFSET, PAIRED, INTERLEAVED, BLOCK_PAIRS)
        sum_first = tl.zeros([BLOCK_PAIRS], p_part.dtype.element_ty)
        sum_second = tl.zeros([BLOCK_PAIRS], p_part.dtype.element_ty)
        if REST > 0:
            w_rest = load_rest_weights(p_weight, OFFSET, PAIRED, REST, BLOCK_REST)
            sum_rest = tl.zeros([BLOCK_REST], p_part.dtype.element_ty)
    for i in range(NUM_HEADS_PER_PROGRAM):
        i_head = (first_head + i).to(tl.int64)
        m_row = only_if(i_head < num_heads, m_token)
        o_row = o_dy + i_head * stride_dy_head
        b_first, b_second = load_pairs(p_dy, o_row, m_row, PAIRED, INTERLEAVED, BLOCK_TOKENS, BLOCK_PAIRS)
        if REST > 0:
            b_rest = load_rest(p_dy, o_row, m_row, PAIRED, REST, BLOCK_REST)
        if p_cos is not None:
            b_turned = b_first * b_cos + b_second * b_sin
            b_second = b_second * b_cos - b_first * b_sin
            b_first = b_turned
        if p_weight is not None:
            o_x = o_token * stride_x + i_head * (PAIRED + REST)
            h_first, h_second = load_pairs(p_x, o_x, m_row, PAIRED, INTERLEAVED, BLOCK_TOKENS, BLOCK_PAIRS)
            squares = tl.sum(h_first * h_first + h_second * h_second, axis=1)
            if REST > 0:
                h_rest = load_rest(p_x, o_x, m_row, PAIRED, REST, BLOCK_REST)
                squares += tl.sum(h_rest * h_rest, axis=1)
            rstd = tl.rsqrt(squares / (PAIRED + REST) + EPS)[:, None]
            h_first *= rstd
            h_second *= rstd
            # Without eps a row that is not there is NaN.
            sum_first += tl.sum(tl.where(m_row[:, None], b_first * h_first, 0.0), axis=0)
            sum_second += tl.sum(tl.where(m_row[:, None], b_second * h_second, 0.0), axis=0)
            b_first *= w_first[None, :]
            b_second *= w_second[None, :]
            slope = tl.sum(b_first * h_first + b_second * h_second, axis=1)
            if REST > 0:
                h_rest *= rstd
                sum_rest += tl.sum(tl.where(m_row[:, None], b_rest * h_rest, 0.0), axis=0)
                b_rest *= w_rest[None, :]
                slope += tl.sum(b_rest * h_rest, axis=1)
            slope = (slope / (PAIRED + REST))[:, None]
            b_first = (b_first - h_first * slope) * rstd
            b_second = (b_second - h_second * slope) * rstd
            if REST > 0:
                b_rest = (b_rest - h_rest * slope) * rstd
        o_dx = o_token * stride_dx + i_head * (PAIRED + REST)
        store_pairs(p_dx, o_dx, m_row, b_first, b_second, PAIRED, INTERLEAVED, BLOCK_PAIRS)
        if REST > 0:
            store_rest(p_dx, o_dx, m_row, b_rest, PAIRED, REST, BLOCK_REST)
    if p_weight is not None:
        STEP: tl.constexpr = 2 if INTERLEAVED else 1
        SECOND: tl.constexpr = 1 if INTERLEAVED else PAIRED // 2
        o_pair = tl.arange(0, BLOCK_PAIRS)
        m_pair = o_pair < PAIRED // 2
        tl.store(p_part + o_pair * STEP, sum_first, mask=m_pair)
        tl.store(p_part + o_pair * STEP + SECOND, sum_second, mask=m_pair)
        if REST > 0:
            o_rest = tl.arange(0, BLOCK_REST)
            tl.store(p_part + PAIRED + o_rest, sum_rest, mask=o_rest < REST)


@jit(do_not_specialize=NOT_SPECIALIZED)
def _prepare_heads_backward_kernel(
    p_dq: tl.tensor,
    p_dk: tl.tensor,
    p_dv: tl.tensor,
    p_qkv: tl.tensor,
    p_dqkv: tl.tensor,
    p_q_weight: tl.tensor,
    p_k_weight: tl.tensor,
    p_q_parts: tl.tensor,
    p_k_parts: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    p_positions: tl.tensor,
    num_tokens: tl.int64,
    seq: tl.int64,
    num_positions: tl.int64,
    num_heads: tl.int32,
    num_kv_heads: tl.int32,
    stride_qkv: tl.int64,
    stride_dqkv: tl.int64,
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
    """Write NUM_HEADS_PER_PROGRAM heads of BLOCK_TOKENS tokens of dqkv per program, and a row of a norm's parts.

    p_qkv and all of a norm's are None without norms.
    """
    o_token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    m_token = o_token < num_tokens
    i_batch, i_place = o_token // seq, o_token % seq
    i_group = tl.program_id(1)
    q_groups, k_groups = tl.cdiv(num_heads, NUM_HEADS_PER_PROGRAM), tl.cdiv(num_kv_heads, NUM_HEADS_PER_PROGRAM)
    HEAD: tl.constexpr = PAIRED + REST
    if i_group < q_groups:
        p_q_part = p_q_parts
        if p_q_weight is not None:
            p_q_part += (tl.program_id(0).to(tl.int64) * q_groups + i_group) * HEAD
        _prepare_heads_backward(
            p_dq,
            p_qkv,
            p_dqkv,
            p_q_weight,
            p_q_part,
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
            stride_dqkv,
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
        p_k_part = p_k_parts
        p_keys = p_qkv
        if p_k_weight is not None:
            p_k_part += (tl.program_id(0).to(tl.int64) * k_groups + i_group - q_groups) * HEAD
            p_keys += num_heads * HEAD
        _prepare_heads_backward(
            p_dk,
            p_keys,
            p_dqkv + num_heads * HEAD,
            p_k_weight,
            p_k_part,
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
            stride_dqkv,
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
    else:
        _prepare_heads_backward(
            p_dv,
            None,
            p_dqkv + (num_heads + num_kv_heads) * HEAD,
            None,
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
            stride_dqkv,
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


def launch_prepare_backward(
    gradients: tuple[Tensor, Tensor, Tensor], qkv: Tensor | None, heads: Heads, rotary: Rotary, weights: Weights
) -> tuple[Tensor, Tensor]:
    """Run tpkernels::prepare_heads_backward with its kernel, and add the parts of the weights' gradient."""
    dq, dk, dv = (of if of.stride(3) == 1 else of.contiguous() for of in gradients)
    qkv = qkv if qkv is None or qkv.stride(1) == 1 else qkv.contiguous()
    batch, seq, _, head = dq.shape
    num_tokens, num_columns = batch * seq, (heads.num_heads + 2 * heads.num_kv_heads) * head
    dqkv = dq.new_empty(num_tokens, num_columns)
    # With norms a program holds twice as much.
    constants = constants_of(heads, head, rotary, dq.element_size(), 1024 if weights.q is None else 512)
    num_blocks = cdiv(num_tokens, constants["BLOCK_TOKENS"])
    wide, normed = accumulation_dtype(dq.dtype), weights.q is not None
    rows = [num_blocks * groups_of(number) if normed else 0 for number in (heads.num_heads, heads.num_kv_heads)]
    parts = [torch.empty(number, head, dtype=wide, device=dq.device) for number in rows]
    run(
        _prepare_heads_backward_kernel,
        (num_blocks, groups_of(heads.num_heads) + 2 * groups_of(heads.num_kv_heads)),
        dq,
        dk,
        dv,
        qkv,
        dqkv,
        *weights.dense(),
        *(parts if normed else (None, None)),
        *rotary,
        num_tokens,
        seq,
        0 if rotary.cos is None else rotary.cos.shape[0],
        heads.num_heads,
        heads.num_kv_heads,
        0 if qkv is None else qkv.stride(0),
        dqkv.stride(0),
        *dq.stride()[:3],
        *dk.stride()[:3],
        *dv.stride()[:3],
        **constants,
    )
    return dqkv, torch.stack([part.sum(0) for part in parts]) if normed else dqkv.new_empty(0, head, dtype=wide)
