"""The Triton kernels of prepare.py, which has the equations, and their launchers.

A program has some tokens and up to four heads of q, of k or of v, so that it reads the tables once for several heads. A
head's rotated columns are held as the two elements of each pair; what partial rotation leaves as it is, beside them.
Without rotation all columns are such pairs, which nothing rotates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.launch import accumulation_dtype, cdiv, jit, only_if, power_of_2, run, tl, widened

_NUM_HEADS_PER_PROGRAM = 4


class Heads(NamedTuple):
    """What a packed product is made of, and how its heads become q, k and v.

    Attributes:
        batch, num_heads, num_kv_heads: B, H and G.
        interleaved: the two columns of a rotated pair are neighbours.
        heads_first: q, k and v lie as [B, heads, S, E]; else as [B, S, heads, E].
        eps, offset: of the heads' norms: added to the mean square, and to the weights.
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    interleaved: bool = False
    heads_first: bool = False
    eps: float = 0.0
    offset: float = 0.0

    def head_size(self, qkv: Tensor) -> int:
        """Return E."""
        return qkv.shape[1] // (self.num_heads + 2 * self.num_kv_heads)

    def empty(self, qkv: Tensor, num_heads: int) -> Tensor:
        """Return a tensor [B, S, num_heads, E] that holds anything, laid out as asked for."""
        seq, size = qkv.shape[0] // max(1, self.batch), self.head_size(qkv)
        if self.heads_first:
            return qkv.new_empty(self.batch, num_heads, seq, size).transpose(1, 2)
        return qkv.new_empty(self.batch, seq, num_heads, size)


class Rotary(NamedTuple):
    """cos and sin [P, R/2], and each token's row [T], by default its place in the sequence; all None for none."""

    cos: Tensor | None = None
    sin: Tensor | None = None
    positions: Tensor | None = None


class Weights(NamedTuple):
    """Those of the heads' norms, [E] each; None for none."""

    q: Tensor | None = None
    k: Tensor | None = None

    def dense(self) -> tuple[Tensor | None, ...]:
        """Return them without gaps."""
        return tuple(None if weight is None else weight.contiguous() for weight in self)


@jit
def _load_pairs(
    p: tl.tensor,
    o_row: tl.tensor,
    m_row: tl.tensor,
    PAIRED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
) -> Any:
    """Load the first PAIRED columns of rows as the two elements of each pair, [BLOCK_TOKENS, BLOCK_PAIRS] each."""
    if INTERLEAVED:
        # Both elements of a pair are loaded together, and split in registers.
        o_column = tl.arange(0, 2 * BLOCK_PAIRS)
        # [BLOCK_TOKENS, 2 * BLOCK_PAIRS]
        b = tl.load(
            p + o_row[:, None] + o_column[None, :], mask=m_row[:, None] & (o_column < PAIRED)[None, :], other=0.0
        )
        b_first, b_second = tl.split(tl.reshape(widened(b), [BLOCK_TOKENS, BLOCK_PAIRS, 2]))
    else:
        o_pair = tl.arange(0, BLOCK_PAIRS)
        m_pair = m_row[:, None] & (o_pair < PAIRED // 2)[None, :]
        # [BLOCK_TOKENS, BLOCK_PAIRS]
        b_first = widened(tl.load(p + o_row[:, None] + o_pair[None, :], mask=m_pair, other=0.0))
        # [BLOCK_TOKENS, BLOCK_PAIRS]
        b_second = widened(tl.load(p + o_row[:, None] + PAIRED // 2 + o_pair[None, :], mask=m_pair, other=0.0))
    return b_first, b_second


@jit
def _store_pairs(
    p: tl.tensor,
    o_row: tl.tensor,
    m_row: tl.tensor,
    b_first: tl.tensor,
    b_second: tl.tensor,
    PAIRED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
) -> None:
    """Store what `_load_pairs` loads."""
    if INTERLEAVED:
        o_column = tl.arange(0, 2 * BLOCK_PAIRS)
        b = tl.interleave(b_first, b_second).to(p.dtype.element_ty)
        tl.store(p + o_row[:, None] + o_column[None, :], b, mask=m_row[:, None] & (o_column < PAIRED)[None, :])
    else:
        o_pair = tl.arange(0, BLOCK_PAIRS)
        m_pair = m_row[:, None] & (o_pair < PAIRED // 2)[None, :]
        tl.store(p + o_row[:, None] + o_pair[None, :], b_first.to(p.dtype.element_ty), mask=m_pair)
        tl.store(p + o_row[:, None] + PAIRED // 2 + o_pair[None, :], b_second.to(p.dtype.element_ty), mask=m_pair)


@jit
def _load_rest(
    p: tl.tensor,
    o_row: tl.tensor,
    m_row: tl.tensor,
    PAIRED: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> tl.tensor:
    """Load the columns behind the pairs, [tokens, BLOCK_REST]."""
    o_rest = tl.arange(0, BLOCK_REST)
    m_rest = m_row[:, None] & (o_rest < REST)[None, :]
    return widened(tl.load(p + o_row[:, None] + PAIRED + o_rest[None, :], mask=m_rest, other=0.0))


@jit
def _store_rest(
    p: tl.tensor,
    o_row: tl.tensor,
    m_row: tl.tensor,
    b_rest: tl.tensor,
    PAIRED: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    """Store what `_load_rest` loads."""
    o_rest = tl.arange(0, BLOCK_REST)
    m_rest = m_row[:, None] & (o_rest < REST)[None, :]
    tl.store(p + o_row[:, None] + PAIRED + o_rest[None, :], b_rest.to(p.dtype.element_ty), mask=m_rest)


@jit
def _load_tables(
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    p_positions: tl.tensor,
    o_token: tl.tensor,
    m_token: tl.tensor,
    seq: tl.int64,
    num_positions: tl.int64,
    PAIRED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
) -> Any:
    """Load cos and sin of tokens, [tokens, BLOCK_PAIRS]; of a position outside the tables NaN, which is noticed."""
    if p_positions is None:
        o_position = o_token % seq
    else:
        # [tokens]
        o_position = tl.load(p_positions + o_token, mask=m_token, other=0).to(tl.int64)
    m_known = (o_position >= 0) & (o_position < num_positions)
    o_pair = tl.arange(0, BLOCK_PAIRS)
    m_pair = (o_pair < PAIRED // 2)[None, :]
    o_table = o_position[:, None] * (PAIRED // 2) + o_pair[None, :]
    # [tokens, BLOCK_PAIRS]
    b_cos = tl.load(p_cos + o_table, mask=m_known[:, None] & m_pair, other=float("nan"))
    # [tokens, BLOCK_PAIRS]
    b_sin = tl.load(p_sin + o_table, mask=m_known[:, None] & m_pair, other=float("nan"))
    # Columns that there are not stay 0, for sums over a row.
    return tl.where(m_pair, b_cos, 0.0), tl.where(m_pair, b_sin, 0.0)


@jit
def _load_weights(
    p_weight: tl.tensor,
    OFFSET: tl.constexpr,
    PAIRED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
) -> Any:
    """Load what a norm multiplies the two elements of each pair by, [BLOCK_PAIRS] each."""
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    SECOND: tl.constexpr = 1 if INTERLEAVED else PAIRED // 2
    o_pair = tl.arange(0, BLOCK_PAIRS)
    m_pair = o_pair < PAIRED // 2
    # [BLOCK_PAIRS]
    b_first = widened(tl.load(p_weight + o_pair * STEP, mask=m_pair, other=0.0)) + OFFSET
    # [BLOCK_PAIRS]
    b_second = widened(tl.load(p_weight + o_pair * STEP + SECOND, mask=m_pair, other=0.0)) + OFFSET
    return b_first, b_second


@jit
def _load_rest_weights(
    p_weight: tl.tensor, OFFSET: tl.constexpr, PAIRED: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr
) -> tl.tensor:
    """Load what a norm multiplies the columns behind the pairs by, [BLOCK_REST]."""
    o_rest = tl.arange(0, BLOCK_REST)
    return widened(tl.load(p_weight + PAIRED + o_rest, mask=o_rest < REST, other=0.0)) + OFFSET


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
        b_cos, b_sin = _load_tables(
            p_cos, p_sin, p_positions, o_token, m_token, seq, num_positions, PAIRED, BLOCK_PAIRS
        )
    for i in tl.static_range(NUM_HEADS_PER_PROGRAM):
        i_head = (first_head + i).to(tl.int64)
        m_row = only_if(i_head < num_heads, m_token)
        o_x = o_token * stride_x + i_head * (PAIRED + REST)
        o_row = o_y + i_head * stride_y_head
        b_first, b_second = _load_pairs(p_x, o_x, m_row, PAIRED, INTERLEAVED, BLOCK_TOKENS, BLOCK_PAIRS)
        if REST > 0:
            b_rest = _load_rest(p_x, o_x, m_row, PAIRED, REST, BLOCK_REST)
        if p_weight is not None:
            squares = tl.sum(b_first * b_first + b_second * b_second, axis=1)
            if REST > 0:
                squares += tl.sum(b_rest * b_rest, axis=1)
            rstd = tl.rsqrt(squares / (PAIRED + REST) + EPS)[:, None]
            w_first, w_second = _load_weights(p_weight, OFFSET, PAIRED, INTERLEAVED, BLOCK_PAIRS)
            b_first *= rstd * w_first[None, :]
            b_second *= rstd * w_second[None, :]
            if REST > 0:
                b_rest *= rstd * _load_rest_weights(p_weight, OFFSET, PAIRED, REST, BLOCK_REST)[None, :]
        if p_cos is not None:
            b_turned = b_first * b_cos - b_second * b_sin
            b_second = b_second * b_cos + b_first * b_sin
            b_first = b_turned
        _store_pairs(p_y, o_row, m_row, b_first, b_second, PAIRED, INTERLEAVED, BLOCK_PAIRS)
        if REST > 0:
            _store_rest(p_y, o_row, m_row, b_rest, PAIRED, REST, BLOCK_REST)


_NOT_SPECIALIZED = ["num_tokens", "seq", "num_positions"]


@jit(do_not_specialize=_NOT_SPECIALIZED)
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
        b_cos, b_sin = _load_tables(
            p_cos, p_sin, p_positions, o_token, m_token, seq, num_positions, PAIRED, BLOCK_PAIRS
        )
    if p_weight is not None:
        w_first, w_second = _load_weights(p_weight, OFFSET, PAIRED, INTERLEAVED, BLOCK_PAIRS)
        sum_first = tl.zeros([BLOCK_PAIRS], p_part.dtype.element_ty)
        sum_second = tl.zeros([BLOCK_PAIRS], p_part.dtype.element_ty)
        if REST > 0:
            w_rest = _load_rest_weights(p_weight, OFFSET, PAIRED, REST, BLOCK_REST)
            sum_rest = tl.zeros([BLOCK_REST], p_part.dtype.element_ty)
    for i in tl.static_range(NUM_HEADS_PER_PROGRAM):
        i_head = (first_head + i).to(tl.int64)
        m_row = only_if(i_head < num_heads, m_token)
        o_row = o_dy + i_head * stride_dy_head
        b_first, b_second = _load_pairs(p_dy, o_row, m_row, PAIRED, INTERLEAVED, BLOCK_TOKENS, BLOCK_PAIRS)
        if REST > 0:
            b_rest = _load_rest(p_dy, o_row, m_row, PAIRED, REST, BLOCK_REST)
        if p_cos is not None:
            b_turned = b_first * b_cos + b_second * b_sin
            b_second = b_second * b_cos - b_first * b_sin
            b_first = b_turned
        if p_weight is not None:
            o_x = o_token * stride_x + i_head * (PAIRED + REST)
            h_first, h_second = _load_pairs(p_x, o_x, m_row, PAIRED, INTERLEAVED, BLOCK_TOKENS, BLOCK_PAIRS)
            squares = tl.sum(h_first * h_first + h_second * h_second, axis=1)
            if REST > 0:
                h_rest = _load_rest(p_x, o_x, m_row, PAIRED, REST, BLOCK_REST)
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
        _store_pairs(p_dx, o_dx, m_row, b_first, b_second, PAIRED, INTERLEAVED, BLOCK_PAIRS)
        if REST > 0:
            _store_rest(p_dx, o_dx, m_row, b_rest, PAIRED, REST, BLOCK_REST)
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


@jit(do_not_specialize=_NOT_SPECIALIZED)
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


def _constants(heads: Heads, head: int, rotary: Rotary, itemsize: int, elements: int) -> dict[str, Any]:
    """Return the kernels' constants: as many tokens as make `elements` pairs per program. Not tuned on a GPU yet."""
    paired = head if rotary.cos is None else 2 * rotary.cos.shape[1]
    pairs = power_of_2(paired // 2)
    per_program = elements // (2 if itemsize > 2 or heads.interleaved else 1)
    return {
        "EPS": heads.eps,
        "OFFSET": heads.offset,
        "PAIRED": paired,
        "REST": head - paired,
        "INTERLEAVED": heads.interleaved and rotary.cos is not None,
        "NUM_HEADS_PER_PROGRAM": _NUM_HEADS_PER_PROGRAM,
        "BLOCK_TOKENS": max(1, min(64, per_program // max(pairs, power_of_2(head - paired)))),
        "BLOCK_PAIRS": pairs,
        "BLOCK_REST": power_of_2(head - paired),
        "num_warps": 4,
    }


def _groups(num_heads: int) -> int:
    return cdiv(num_heads, _NUM_HEADS_PER_PROGRAM)


def launch_prepare(
    qkv: Tensor, heads: Heads, rotary: Rotary, weights: Weights, *, copies_v: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run the operator tpkernels::prepare_heads with its kernel; without copies_v leave v out."""
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    q, k = heads.empty(qkv, heads.num_heads), heads.empty(qkv, heads.num_kv_heads)
    v = heads.empty(qkv, heads.num_kv_heads) if copies_v else None
    constants = _constants(heads, q.shape[3], rotary, qkv.element_size(), 1024)
    groups = _groups(heads.num_heads) + (1 + copies_v) * _groups(heads.num_kv_heads)
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


def launch_prepare_backward(
    gradients: tuple[Tensor, Tensor, Tensor], qkv: Tensor | None, heads: Heads, rotary: Rotary, weights: Weights
) -> tuple[Tensor, Tensor]:
    """Run the operator tpkernels::prepare_heads_backward with its kernel, and add the parts of the weights' gradient."""
    dq, dk, dv = (of if of.stride(3) == 1 else of.contiguous() for of in gradients)
    qkv = qkv if qkv is None or qkv.stride(1) == 1 else qkv.contiguous()
    batch, seq, _, head = dq.shape
    num_tokens, num_columns = batch * seq, (heads.num_heads + 2 * heads.num_kv_heads) * head
    dqkv = dq.new_empty(num_tokens, num_columns)
    # With norms a program holds twice as much.
    constants = _constants(heads, head, rotary, dq.element_size(), 1024 if weights.q is None else 512)
    num_blocks = cdiv(num_tokens, constants["BLOCK_TOKENS"])
    wide, normed = accumulation_dtype(dq.dtype), weights.q is not None
    rows = [num_blocks * _groups(number) if normed else 0 for number in (heads.num_heads, heads.num_kv_heads)]
    parts = [torch.empty(number, head, dtype=wide, device=dq.device) for number in rows]
    run(
        _prepare_heads_backward_kernel,
        (num_blocks, _groups(heads.num_heads) + 2 * _groups(heads.num_kv_heads)),
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
