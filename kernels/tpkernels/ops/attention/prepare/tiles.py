"""Tiles of prepare_heads: what heads are made of, and how a program loads and stores them.

A program has some tokens and up to four heads of q, of k or of v, so that it reads the tables once for several heads. A
head's rotated columns are held as the two elements of each pair; what partial rotation leaves as it is, beside them.
Without rotation all columns are such pairs, which nothing rotates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from tpkernels.launch import cdiv, jit, power_of_2, tl, widened

NUM_HEADS_PER_PROGRAM = 4
# Sizes that must not cause recompilation.
NOT_SPECIALIZED = ["num_tokens", "seq", "num_positions"]


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
def load_pairs(
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
def store_pairs(
    p: tl.tensor,
    o_row: tl.tensor,
    m_row: tl.tensor,
    b_first: tl.tensor,
    b_second: tl.tensor,
    PAIRED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
) -> None:
    """Store what `load_pairs` loads."""
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
def load_rest(
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
def store_rest(
    p: tl.tensor,
    o_row: tl.tensor,
    m_row: tl.tensor,
    b_rest: tl.tensor,
    PAIRED: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_REST: tl.constexpr,
) -> None:
    """Store what `load_rest` loads."""
    o_rest = tl.arange(0, BLOCK_REST)
    m_rest = m_row[:, None] & (o_rest < REST)[None, :]
    tl.store(p + o_row[:, None] + PAIRED + o_rest[None, :], b_rest.to(p.dtype.element_ty), mask=m_rest)


@jit
def load_tables(
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
def load_weights(
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
def load_rest_weights(
    p_weight: tl.tensor, OFFSET: tl.constexpr, PAIRED: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr
) -> tl.tensor:
    """Load what a norm multiplies the columns behind the pairs by, [BLOCK_REST]."""
    o_rest = tl.arange(0, BLOCK_REST)
    return widened(tl.load(p_weight + PAIRED + o_rest, mask=o_rest < REST, other=0.0)) + OFFSET


def constants_of(heads: Heads, head: int, rotary: Rotary, itemsize: int, elements: int) -> dict[str, Any]:
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
        "NUM_HEADS_PER_PROGRAM": NUM_HEADS_PER_PROGRAM,
        "BLOCK_TOKENS": max(1, min(64, per_program // max(pairs, power_of_2(head - paired)))),
        "BLOCK_PAIRS": pairs,
        "BLOCK_REST": power_of_2(head - paired),
        "num_warps": 4,
    }


def groups_of(num_heads: int) -> int:
    return cdiv(num_heads, NUM_HEADS_PER_PROGRAM)
