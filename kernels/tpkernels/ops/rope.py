"""Rotary position embedding: pairs of a head's elements are rotated by angles that grow with the token's position.

    (a, b) -> (a cos - b sin, b cos + a sin)          for each pair i of E/2, angle = position * theta^(-2i / E)
    x[T, H/tp, E] -> y[T, H/tp, E]                    pair i is (i, i + E/2), or (2i, 2i + 1) interleaved
    dx[T, H/tp, E] = dy rotated back                  the same kernel; nothing of x is kept

Every head is rotated alike, so a rank's heads need nothing of another rank's. Parts of longer sequences, and packed
documents, pass their positions. Forward and backward read x once and write y once; the tables are read once for several
heads.

The decision a reader will question: the result is a new tensor, although a rotation could be done in place. x is
usually a view of the fused projection's output, and attention needs operands without gaps, so the copy is needed
anyway.

The tables, and what scales their frequencies, are in rope_tables.py.

Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding", arXiv 2104.09864, section 3.4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.derivatives import refuse_tangents
from tpkernels.launch import accumulation_dtype, by_triton, cdiv, jit, only_if, power_of_2, run, tl, widened

# Heads with more elements leave too few registers per thread.
_MOST_ELEMENTS = 1024
_INTEGERS = (torch.int32, torch.int64)


def rope_reference(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, inverse: bool
) -> Tensor:
    """Return y computed in x's dtype: the specification."""
    if positions is None:
        positions = torch.arange(x.shape[0], device=x.device) % cos.shape[0]
    cos, sin = (table[positions].to(x.dtype)[:, None] for table in (cos, sin))
    sin = -sin if inverse else sin
    first, second = _pairs(x, interleaved)
    rotated = first * cos - second * sin, second * cos + first * sin
    return torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)


@jit(do_not_specialize=["num_tokens", "num_positions"])
def _rope_kernel(
    p_x: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    p_positions: tl.tensor,
    p_y: tl.tensor,
    num_tokens: tl.int64,
    num_positions: tl.int64,
    num_heads: tl.int32,
    stride_token: tl.int64,
    stride_head: tl.int64,
    stride_y_token: tl.int64,
    stride_y_head: tl.int64,
    stride_cos: tl.int64,
    stride_sin: tl.int64,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    NUM_HEADS_PER_PROGRAM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """Rotate BLOCK_TOKENS tokens of NUM_HEADS_PER_PROGRAM heads per program; p_positions may be None."""
    o_token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    o_pair = tl.arange(0, BLOCK_HALF)
    m_token, m_pair = o_token < num_tokens, o_pair < HALF
    if p_positions is None:
        o_position = o_token % num_positions
    else:
        # [BLOCK_TOKENS]
        o_position = tl.load(p_positions + o_token, mask=m_token, other=0).to(tl.int64)
    m_known = (o_position >= 0) & (o_position < num_positions)
    m_table = m_known[:, None] & m_pair[None, :]
    # A position outside the tables gives NaN, which is noticed; the memory beside the tables would not be.
    # [BLOCK_TOKENS, BLOCK_HALF]
    b_cos = tl.load(p_cos + o_position[:, None] * stride_cos + o_pair[None, :], mask=m_table, other=float("nan"))
    # [BLOCK_TOKENS, BLOCK_HALF]
    b_sin = tl.load(p_sin + o_position[:, None] * stride_sin + o_pair[None, :], mask=m_table, other=float("nan"))
    if INVERSE:
        b_sin = -b_sin
    for i in tl.static_range(NUM_HEADS_PER_PROGRAM):
        i_head = tl.program_id(1) * NUM_HEADS_PER_PROGRAM + i
        m_row = only_if(i_head < num_heads, m_token)
        o_x = o_token[:, None] * stride_token + i_head.to(tl.int64) * stride_head
        o_y = o_token[:, None] * stride_y_token + i_head.to(tl.int64) * stride_y_head
        if INTERLEAVED:
            # Load both elements of a pair together, and split them in registers. Loading every other element would
            # waste half of each load.
            o_element = tl.arange(0, 2 * BLOCK_HALF)
            m_whole = m_row[:, None] & (o_element < 2 * HALF)[None, :]
            # [BLOCK_TOKENS, 2 * BLOCK_HALF]
            b_x = widened(tl.load(p_x + o_x + o_element[None, :], mask=m_whole, other=0.0))
            b_first, b_second = tl.split(tl.reshape(b_x, [BLOCK_TOKENS, BLOCK_HALF, 2]))
            b_y = tl.interleave(b_first * b_cos - b_second * b_sin, b_second * b_cos + b_first * b_sin)
            tl.store(p_y + o_y + o_element[None, :], b_y.to(p_y.dtype.element_ty), mask=m_whole)
        else:
            m_half = m_row[:, None] & m_pair[None, :]
            # [BLOCK_TOKENS, BLOCK_HALF]
            b_first = widened(tl.load(p_x + o_x + o_pair[None, :], mask=m_half, other=0.0))
            # [BLOCK_TOKENS, BLOCK_HALF]
            b_second = widened(tl.load(p_x + o_x + HALF + o_pair[None, :], mask=m_half, other=0.0))
            b_y = b_first * b_cos - b_second * b_sin
            tl.store(p_y + o_y + o_pair[None, :], b_y.to(p_y.dtype.element_ty), mask=m_half)
            b_y = b_second * b_cos + b_first * b_sin
            tl.store(p_y + o_y + HALF + o_pair[None, :], b_y.to(p_y.dtype.element_ty), mask=m_half)


def _block(num_heads: int, half: int, itemsize: int, interleaved: bool) -> dict[str, int]:
    """Return the block: 16 bytes of x per thread: 8 pairs of bfloat16's halves, else 4. Not tuned on a GPU yet."""
    columns = power_of_2(half)
    pairs = 512 if interleaved or itemsize > 2 else 1024
    return {
        "NUM_HEADS_PER_PROGRAM": min(4, num_heads),
        "BLOCK_TOKENS": max(1, min(64, pairs // columns)),
        "BLOCK_HALF": columns,
        "num_warps": 4,
    }


def launch_rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    inverse: bool,
    out: Tensor | None = None,
) -> Tensor:
    """Run the operator tpkernels::rope with its kernel; `out` has x's shape and dtype, and no gaps between columns."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    num_tokens, num_heads, num_elements = x.shape
    x, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, cos, sin))
    block = _block(num_heads, num_elements // 2, x.element_size(), interleaved)
    run(
        _rope_kernel,
        (cdiv(num_tokens, block["BLOCK_TOKENS"]), cdiv(num_heads, max(1, block["NUM_HEADS_PER_PROGRAM"]))),
        x,
        cos,
        sin,
        None if positions is None else positions.contiguous(),
        y,
        num_tokens,
        cos.shape[0],
        num_heads,
        x.stride(0),
        x.stride(1),
        y.stride(0),
        y.stride(1),
        cos.stride(0),
        sin.stride(0),
        HALF=num_elements // 2,
        INTERLEAVED=interleaved,
        INVERSE=inverse,
        **block,
    )
    return y


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and of the second element of each pair."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _on_host(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, inverse: bool) -> Tensor:
    num_positions = cos.shape[0]
    if positions is None:
        positions = torch.arange(x.shape[0]) % num_positions
    elif bool(((positions < 0) | (positions >= num_positions)).any()):
        least, most = positions.aminmax()
        raise ValueError(
            f"positions must be rows of the tables, 0 to {num_positions - 1}: they are {int(least)} to {int(most)}: "
            "make tables of more positions"
        )
    cos, sin = cos[positions][:, None], sin[positions][:, None]
    first, second = _pairs(x.to(cos.dtype), interleaved)
    y = cos.new_empty(x.shape)
    y_first, y_second = _pairs(y, interleaved)
    sign = -1 if inverse else 1
    torch.mul(first, cos, out=y_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=y_second).addcmul_(first, sin, value=sign)
    return y.to(x.dtype)


@torch.library.custom_op("tpkernels::rope", mutates_args=())
def rope_op(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, inverse: bool) -> Tensor:
    """Return y[T, H, E], new and contiguous, for x[T, H, E] of any strides."""
    return (launch_rope if by_triton(x) else _on_host)(x, cos, sin, positions, interleaved, inverse)


@rope_op.register_fake
def _(x: Tensor, cos: Any, sin: Any, positions: Any, interleaved: bool, inverse: bool) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, positions, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin, positions)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx = rope_op(dy, *ctx.saved_tensors, ctx.interleaved, not ctx.inverse)
    return dx, None, None, None, None, None


rope_op.register_autograd(_backward, setup_context=_setup_context)


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    interleaved: bool = False,
    inverse: bool = False,
) -> Tensor:
    """Rotate pairs of each head's elements by the angles of the token's position.

        y[t, h, i]       = x[t, h, i] cos[p, i] - x[t, h, i + E/2] sin[p, i]           p = positions[t]
        y[t, h, i + E/2] = x[t, h, i + E/2] cos[p, i] + x[t, h, i] sin[p, i]
        dx = rope(dy, inverse=not inverse)

    Args:
        x: [T, H, E], floating point, any strides: it can be a view of a fused projection's output. E is even, 2 to
            1024.
        cos, sin: [P, E/2], from rope_tables: float32, or float64 for float64 x; constants, without a gradient.
        positions: [T], int32 or int64: each token's row of the tables. By default token t is at t mod P. That is right
            for one sequence, and for consecutive sequences of P tokens each; more tokens than rows must be such
            sequences.
        interleaved: pairs are neighbours (2i, 2i + 1), as in Meta's Llama and GPT-J; else i and i + E/2, as in Hugging
            Face's Llama. Weights are trained for one of the two.
        inverse: rotate back.

    Returns:
        y of x's shape and dtype, new and contiguous.

    Raises:
        ValueError: shapes or dtypes that do not fit; on a CPU also a position outside the tables. On a GPU such a token
            is NaN, because checking would wait for the device.

    Cost: reads x, writes y, and so does backward; keeps only the tables and positions. On a CPU several passes in
    float32.
    Numerics: computed in float32, or float64 for float64, and rounded once; deterministic.
    Source: Su et al., arXiv 2104.09864, section 3.4.2.
    """
    num_elements = x.shape[-1] if x.dim() == 3 else 0
    if not x.is_floating_point() or num_elements % 2 or not 0 < num_elements <= _MOST_ELEMENTS:
        raise ValueError(
            f"rope takes x[T, H, E] of floating-point numbers, E even and 2 to {_MOST_ELEMENTS}: "
            f"x is {tuple(x.shape)} {x.dtype}: split the projection's columns into heads"
        )
    wide = accumulation_dtype(x.dtype)
    for name, table in (("cos", cos), ("sin", sin)):
        fits = table.dim() == 2 and table.shape == (cos.shape[0], num_elements // 2) and table.shape[0] > 0
        if not fits or table.dtype != wide or table.requires_grad:
            raise ValueError(
                f"rope's tables are constants [P, {num_elements // 2}] of {wide} for x {tuple(x.shape)} of {x.dtype}: "
                f"{name} is {tuple(table.shape)} {table.dtype}, requires_grad {table.requires_grad}: "
                "make them by rope_tables"
            )
    if positions is not None and (positions.shape != x.shape[:1] or positions.dtype not in _INTEGERS):
        raise ValueError(
            f"rope's positions are one integer per token, [{x.shape[0]}] of int32 or int64: "
            f"got {tuple(positions.shape)} {positions.dtype}: flatten or convert them"
        )
    if positions is None and len(x) > len(cos) and len(x) % len(cos):
        raise ValueError(
            f"without positions tokens are one sequence within the tables, or whole sequences of their length: "
            f"{len(x)} tokens, {len(cos)} rows: make longer tables, or pass positions"
        )
    refuse_tangents("rope", x)
    y: Tensor = rope_op(x, cos, sin, positions, interleaved, inverse)
    return y


def document_positions(cumulative_lengths: Tensor, num_tokens: int) -> Tensor:
    """Return the position of each token in packed documents: 0, 1, 2, ... within each.

        positions[t] = t - (the last of cumulative_lengths that is at most t)

    Args:
        cumulative_lengths: [num_documents + 1], int32 or int64: where each document starts, then num_tokens. Its
            values are not checked here; documents may be empty.
        num_tokens: T.

    Returns:
        int32 [T] on the same device.

    Raises:
        ValueError: cumulative_lengths is not such a vector.

    Cost: one binary search per token; does not wait for the device.
    """
    if cumulative_lengths.dim() != 1 or not len(cumulative_lengths) or cumulative_lengths.dtype not in _INTEGERS:
        raise ValueError(
            "cumulative_lengths is [num_documents + 1] of int32 or int64, starting with 0: "
            f"got {tuple(cumulative_lengths.shape)} {cumulative_lengths.dtype}: pass lengths.cumsum(0) after a 0"
        )
    starts = cumulative_lengths.contiguous()
    tokens = torch.arange(num_tokens, dtype=starts.dtype, device=starts.device)
    document = torch.searchsorted(starts, tokens, right=True) - 1
    return (tokens - starts[document]).to(torch.int32)
