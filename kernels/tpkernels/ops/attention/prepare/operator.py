"""Heads for attention out of the fused projection's product: split, normed and rotated, in one pass each way.

    x = the columns of qkv[T, (H + 2G) * E], side by side: q[T, H, E], k[T, G, E], v[T, G, E]
    q[B, S, H, E] = rope(norm(x_q));   k[B, S, G, E] = rope(norm(x_k));   v[B, S, G, E] = x_v
    norm(x) = x * (mean(x^2) + eps)^(-1/2) * (w + offset)       of each head; left out without weights
    rope    = pairs of the first R of E columns rotated by the token's position; left out without tables

    dqkv[T, (H + 2G) * E] = norm'(rope^-1(dq)), norm'(rope^-1(dk)), dv, side by side, written once
    dw[E] = sum over tokens and heads of rope^-1(dq) * x * rstd

For attention that takes q, k and v as three tensors, as torch's does: without this, rotations of q and of k, a copy of
v, and backward a splitting and a putting together are five kernels, which move everything twice.

Numerics: float32 (float64 for float64) from loading to storing: the normed head is not rounded before it is rotated.

The decision a reader will question: rstd is computed again in backward, which reads x in any case, instead of being
kept.

Sources: Zhang and Sennrich, NeurIPS 2019 (norm); Su et al., arXiv 2104.09864, section 3.4 (rotation); Henry et al.,
arXiv 2010.04245 (norms of heads).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpkernels.autocast import lowered
from tpkernels.derivatives import differentiable_once, refuse_tangents
from tpkernels.launch import accumulation_dtype, by_triton
from tpkernels.ops.attention.prepare.backward import launch_prepare_backward
from tpkernels.ops.attention.prepare.forward import launch_prepare
from tpkernels.ops.attention.prepare.tiles import Heads, Rotary, Weights

_MOST_COLUMNS = 256
_INTEGERS = (torch.int32, torch.int64)


def prepare_heads_reference(
    qkv: Tensor, heads: Heads, rotary: Rotary, weights: Weights
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v computed in qkv's dtype, in differentiable operations: the specification."""
    size = heads.head_size(qkv)
    parts = qkv.unflatten(0, (heads.batch, -1)).unflatten(2, (-1, size))
    q, k, v = parts.split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=2)
    tables = _tables(rotary, heads, qkv.dtype, q.shape[1])
    q, k = (
        _rotated(_normed(of, weight, heads), *tables, heads.interleaved)
        for of, weight in zip((q, k), weights, strict=True)
    )
    return q, k, v


def _tables(rotary: Rotary, heads: Heads, dtype: torch.dtype, seq: int) -> tuple[Tensor | None, Tensor | None]:
    """Return cos and sin of every token, [B, S, 1, R/2]."""
    if rotary.cos is None or rotary.sin is None:
        return None, None
    places = rotary.positions
    if places is None:
        places = torch.arange(seq, device=rotary.cos.device).repeat(heads.batch)
    cos, sin = (
        table[places.long()].to(dtype).unflatten(0, (heads.batch, seq))[:, :, None]
        for table in (rotary.cos, rotary.sin)
    )
    return cos, sin


def _normed(x: Tensor, weight: Tensor | None, heads: Heads) -> Tensor:
    if weight is None:
        return x
    return x * (x.square().mean(-1, keepdim=True) + heads.eps).rsqrt() * (weight.to(x.dtype) + heads.offset)


def _rotated(x: Tensor, cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> Tensor:
    if cos is None or sin is None:
        return x
    rotary = 2 * cos.shape[-1]
    of, rest = x[..., :rotary], x[..., rotary:]
    first, second = (of[..., ::2], of[..., 1::2]) if interleaved else of.chunk(2, dim=-1)
    pairs = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat((turned, rest), dim=-1)


def _on_host(
    qkv: Tensor, heads: Heads, rotary: Rotary, weights: Weights, *, copies_v: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Do as launch_prepare by the specification in the wider dtype, rounded once."""
    wide = qkv.to(accumulation_dtype(qkv.dtype))
    found: list[Tensor | None] = []
    for of in prepare_heads_reference(wide, heads, _within(rotary, qkv), weights):
        found.append(heads.empty(qkv, of.shape[2]).copy_(of) if copies_v or len(found) < 2 else None)
    q, k, v = found
    assert q is not None and k is not None
    return q, k, v


def _backward_on_host(
    gradients: tuple[Tensor, Tensor, Tensor], qkv: Tensor | None, heads: Heads, rotary: Rotary, weights: Weights
) -> tuple[Tensor, Tensor]:
    """Do as launch_prepare_backward in the wider dtype, rounded once."""
    dq, dk, dv = gradients
    batch, seq, _, head = dq.shape
    wide = accumulation_dtype(dq.dtype)
    cos, sin = _tables(rotary, heads, wide, seq)
    back = [_rotated(of.to(wide), cos, None if sin is None else -sin, heads.interleaved) for of in (dq, dk)]
    sums = []
    if qkv is not None:
        sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
        parts = qkv.to(wide).unflatten(0, (batch, seq)).unflatten(2, (-1, head)).split(sizes, dim=2)
        for i, (x, weight) in enumerate(zip(parts, weights, strict=False)):
            assert weight is not None
            rstd = (x.square().mean(-1, keepdim=True) + heads.eps).rsqrt()
            h, g = x * rstd, back[i] * (weight.to(wide) + heads.offset)
            sums.append((back[i] * h).sum((0, 1, 2)))
            back[i] = (g - h * (g * h).mean(-1, keepdim=True)) * rstd
    dqkv = torch.cat((*back, dv.to(wide)), dim=2).flatten(2).flatten(0, 1).to(dq.dtype)
    return dqkv, torch.stack(sums) if sums else dqkv.new_empty(0, head, dtype=wide)


def _within(rotary: Rotary, x: Tensor) -> Rotary:
    """Return the tables; raise if a position on the host is not in them."""
    positions, cos = rotary.positions, rotary.cos
    if positions is not None and cos is not None and len(positions):
        least, most = positions.aminmax()
        if int(least) < 0 or int(most) >= len(cos):
            raise ValueError(
                f"positions must be rows of the tables, 0 to {len(cos) - 1}: they are {int(least)} to {int(most)}: "
                "make tables of more positions"
            )
    return rotary


def prepare_forward(
    qkv: Tensor, heads: Heads, rotary: Rotary, weights: Weights, *, copies_v: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run `prepare_heads_op` without torch's dispatcher, for callers inside a Function of their own.

    Args:
        copies_v: without it v is left out: a caller that keeps qkv for the norms may take v as a view of it.
    """
    return (launch_prepare if by_triton(qkv) else _on_host)(qkv, heads, rotary, weights, copies_v=copies_v)


def prepare_backward(
    gradients: tuple[Tensor, Tensor, Tensor], qkv: Tensor | None, heads: Heads, rotary: Rotary, weights: Weights
) -> tuple[Tensor, Tensor]:
    """Run `prepare_heads_backward_op` without torch's dispatcher.

    Returns:
        (dqkv, sums[2, E]): the gradients of the norms' weights, of q and of k, in the wider dtype; [0, E] without.
    """
    backward = launch_prepare_backward if by_triton(gradients[0]) else _backward_on_host
    return backward(gradients, qkv, heads, rotary, weights)


def _heads(integers: Sequence[int], reals: Sequence[float]) -> Heads:
    batch, num_heads, num_kv_heads, interleaved, heads_first = integers
    return Heads(batch, num_heads, num_kv_heads, bool(interleaved), bool(heads_first), *reals)


@torch.library.custom_op("tpkernels::prepare_heads", mutates_args=())
def prepare_heads_op(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    integers: Sequence[int],
    reals: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (q[B, S, H, E], k, v[B, S, G, E]), new; integers and reals are the fields of Heads."""
    found = prepare_forward(qkv, _heads(integers, reals), Rotary(cos, sin, positions), Weights(q_weight, k_weight))
    q, k, v = found
    assert v is not None
    return q, k, v


@prepare_heads_op.register_fake
def _(qkv: Tensor, q_weight: Any, k_weight: Any, cos: Any, sin: Any, positions: Any, integers: Any, reals: Any) -> Any:
    heads = _heads(integers, reals)
    return tuple(heads.empty(qkv, number) for number in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads))


@torch.library.custom_op("tpkernels::prepare_heads_backward", mutates_args=())
def prepare_heads_backward_op(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    integers: Sequence[int],
    reals: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Return (dqkv[T, (H + 2G) * E], sums[2, E]), contiguous; sums is [0, E] without norms, which qkv is for."""
    rotary, weights = Rotary(cos, sin, positions), Weights(q_weight, k_weight)
    return prepare_backward((dq, dk, dv), qkv, _heads(integers, reals), rotary, weights)


@prepare_heads_backward_op.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, qkv: Any, q_weight: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    head, columns = dq.shape[3], (dq.shape[2] + 2 * dk.shape[2]) * dq.shape[3]
    sums = dq.new_empty(0 if q_weight is None else 2, head, dtype=accumulation_dtype(dq.dtype))
    return dq.new_empty(dq.shape[0] * dq.shape[1], columns), sums


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    qkv, q_weight, k_weight, cos, sin, positions, ctx.integers, ctx.reals = inputs
    ctx.save_for_backward(None if q_weight is None else qkv, q_weight, k_weight, cos, sin, positions)


@differentiable_once
def _backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    dqkv, sums = prepare_heads_backward_op(dq, dk, dv, *ctx.saved_tensors, ctx.integers, ctx.reals)
    weights = ctx.saved_tensors[1:3]
    dw = [None if weight is None else of.to(weight.dtype) for of, weight in zip(sums, weights, strict=False)]
    return dqkv, *(dw or (None, None)), None, None, None, None, None


prepare_heads_op.register_autograd(_backward, setup_context=_setup_context)


def prepare_heads(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    seq: int | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-5,
    offset: float = 0.0,
    heads_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused projection's product into q, k and v, norm each head of q and k, and rotate them.

        q[B, S, H, E] = rope(norm(q)), k[B, S, G, E] = rope(norm(k)), v[B, S, G, E]

    Args:
        qkv: [T, (H + 2G) * E], rows of whole sequences, batch first; E even, at most 256.
        num_heads, num_kv_heads: H and G of this rank.
        seq: S, tokens per sequence; default T, one sequence.
        cos, sin: [P, R/2], contiguous, from rope.rope_tables of R columns: constants, float32, or float64 for float64;
            the first R of E columns are rotated. None rotates nothing.
        positions: [T], int32 or int64: each token's row of the tables; default its place in its sequence.
        interleaved: pairs are neighbours (2i, 2i + 1); else i and i + R/2.
        q_weight, k_weight: [E]: of the norms of each head's queries and keys; None for none.
        eps, offset: added to the mean square, and to both weights (Gemma's are stored less 1).
        heads_first: lay q, k and v out as [B, heads, S, E]; else as [B, S, heads, E].

    Returns:
        q, k and v, [B, S, heads, E] in either case, new.

    Raises:
        ValueError: shapes or dtypes that do not fit; on a CPU also a position outside the tables. On a GPU such a token
            is NaN.

    Cost: forward reads qkv and writes as much; backward reads as much, with norms twice, and writes dqkv, and with
    norms a row of float32 for each program's share of a weight's gradient. Keeps the tables, and with norms qkv.
    Numerics: computed in float32, or float64 for float64, and rounded once; deterministic.
    """
    (qkv,) = lowered(qkv)
    columns = num_heads + 2 * num_kv_heads
    size = qkv.shape[1] // columns if qkv.dim() == 2 and num_heads > 0 and num_kv_heads > 0 else 0
    if not size or size * columns != qkv.shape[1] or size % 2 or size > _MOST_COLUMNS or not qkv.is_floating_point():
        raise ValueError(
            f"qkv must be [T, (H + 2G) * E] of floating-point numbers, E even and at most {_MOST_COLUMNS}: got "
            f"{tuple(qkv.shape)} {qkv.dtype}, H {num_heads}, G {num_kv_heads}: pass this rank's numbers of heads"
        )
    num_tokens = len(qkv)
    seq = max(1, num_tokens) if seq is None else seq
    if seq < 1 or num_tokens % seq:
        raise ValueError(f"tokens must be whole sequences: {num_tokens} tokens, seq {seq}: use seq {num_tokens}")
    _check_tables(cos, sin, positions, qkv, size, seq)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if (q_weight is None) != (k_weight is None) or (weight is not None and weight.shape != (size,)):
            raise ValueError(
                f"norms of heads have a weight of q and of k, [{size}] each: {name} is "
                f"{None if weight is None else tuple(weight.shape)}: pass both, or none"
            )
    refuse_tangents("prepare_heads", qkv, q_weight, k_weight)
    integers = [max(1, num_tokens // seq), num_heads, num_kv_heads, int(interleaved), int(heads_first)]
    q, k, v = prepare_heads_op(qkv, q_weight, k_weight, cos, sin, positions, integers, [eps, offset])
    return q, k, v


def _check_tables(
    cos: Tensor | None, sin: Tensor | None, positions: Tensor | None, qkv: Tensor, size: int, seq: int
) -> None:
    wide = accumulation_dtype(qkv.dtype)
    for table in (cos, sin):
        if cos is None and sin is None:
            break
        fits = table is not None and table.dim() == 2 and 0 < 2 * table.shape[1] <= size and table.is_contiguous()
        if table is None or cos is None or not fits or table.dtype != wide or table.shape != cos.shape:
            raise ValueError(
                f"cos and sin must both be contiguous [positions, R / 2] of {wide}, R at most {size}: got "
                f"{[None if t is None else (tuple(t.shape), t.dtype) for t in (cos, sin)]}: use rope.rope_tables"
            )
        if table.requires_grad:
            raise ValueError("cos and sin must be constants: got one that requires a gradient: detach it")
    if positions is not None and (
        positions.shape != qkv.shape[:1] or positions.dtype not in _INTEGERS or not positions.is_contiguous()
    ):
        raise ValueError(
            f"positions are one integer per token, [{len(qkv)}] of int32 or int64: got {tuple(positions.shape)} "
            f"{positions.dtype}: flatten or convert them"
        )
    if cos is not None and positions is None and len(cos) < seq:
        raise ValueError(
            f"the tables must have a row for every place: {len(cos)} rows, sequences of {seq}: make longer tables, or "
            "pass positions"
        )
