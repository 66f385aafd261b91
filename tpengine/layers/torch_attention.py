"""A layer's attention by torch's: heads prepared for it in one pass, and their gradients packed in one.

It is for what tpkernels.ops.attention.choice says; layers/attention.py calls it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from tpkernels.ops.attention.choice import attention_by_torch
from tpkernels.ops.attention.prepare import Heads, Rotary, Weights, prepare_backward, prepare_forward

from tpengine.layers.gradient_sink import check_reaches, total_of
from tpengine.layers.norm import Norm
from tpengine.layers.rows import Documents


class _Prepared(torch.autograd.Function):
    """Local shapes: qkv[T, (H + 2G) E] -> q[B, S, H, E], k, v[B, S, G, E]; w[E] of the norms of q's and k's heads.

    forward:  q = rope(norm(x_q)), k = rope(norm(x_k)), v = x_v
    dgrad:    dqkv = norm'(rope^-1(dq)), norm'(rope^-1(dk)), dv, side by side
    wgrad:    dw = sum over tokens and heads of rope^-1(dq) * x * rstd         partial(tp), into the norm's sink

    The norms need qkv again, which is kept with them; so v stays a view of it. Without them qkv is let go, and v is
    copied.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        norms: tuple[Norm, Norm] | None,
        heads: Heads,
        rotary: Rotary,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = Weights(q_weight, k_weight)
        q, k, v = prepare_forward(qkv, heads, rotary, weights, copies_v=norms is None)
        ctx.save_for_backward(None if norms is None else qkv, q_weight, k_weight, *rotary)
        ctx.norms, ctx.heads = norms, heads
        return q, k, _values(qkv, heads) if v is None else v

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_weight, k_weight, *rotary = ctx.saved_tensors
        weights = Weights(q_weight, k_weight)
        dqkv, sums = prepare_backward((dq, dk, dv), qkv, ctx.heads, Rotary(*rotary), weights)
        found: list[Tensor | None] = [None, None]
        for i, (norm, total) in enumerate(zip(ctx.norms or (), sums, strict=True)):
            if ctx.needs_input_grad[1 + i]:
                found[i] = total_of([norm.sink.add(norm.weight, total, norm.comm)])
        return dqkv, *found, None, None, None


def _values(qkv: Tensor, heads: Heads) -> Tensor:
    """Return v[B, S, G, E], a view."""
    parts = qkv.unflatten(0, (heads.batch, -1)).unflatten(2, (-1, heads.head_size(qkv)))
    return parts[:, :, heads.num_heads + heads.num_kv_heads :]


def attend_by_torch(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    rows: int | Documents,
    tables: tuple[Tensor, Tensor] | tuple[None, None],
    backend: str,
    *,
    window: int | None = None,
    scale: float | None = None,
    head_norms: tuple[Norm, Norm] | None = None,
) -> Tensor:
    """Do as `attend` by one of torch's backends.

    Args:
        qkv, num_heads, num_kv_heads, rows, head_norms: as attend; each norm scales by the root mean square.
        tables: cos and sin of the rotation, or None.
        backend: what choice.chosen_backend returned.
        window, scale: of the scores.
    """
    documents = rows if isinstance(rows, Documents) else None
    q, k, v = prepared_heads(qkv, num_heads, num_kv_heads, rows, tables, head_norms)
    packed: dict[str, Any] = {} if documents is None else {"starts": documents.starts, "longest": documents.seq}
    return attention_by_torch(q, k, v, backend, scale, window=window, **packed).reshape(len(qkv), -1)


def prepared_heads(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    rows: int | Documents,
    tables: tuple[Tensor | None, Tensor | None],
    head_norms: tuple[Norm, Norm] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q[B, S, H, E] and k[B, S, G, E], normed and rotated, and v[B, S, G, E].

    Args: as attend_by_torch; tables [positions, R/2] rotate the first R elements of a head.
    """
    documents = rows if isinstance(rows, Documents) else None
    batch = 1 if documents is not None or not isinstance(rows, int) else len(qkv) // rows
    heads = Heads(batch, num_heads, num_kv_heads)
    if head_norms is not None:
        heads = heads._replace(eps=head_norms[0].eps, offset=head_norms[0].offset)
    if tables[0] is None and head_norms is None:
        # Nothing to compute: views, of which autograd puts the gradients together.
        parts = qkv.unflatten(0, (batch, -1)).unflatten(2, (-1, heads.head_size(qkv)))
        q, k, v = parts.split([num_heads, num_kv_heads, num_kv_heads], dim=2)
        return q, k, v
    places = None if documents is None or tables[0] is None else documents.places
    return _prepared(qkv, heads, Rotary(tables[0], tables[1], places), head_norms)


def _prepared(
    qkv: Tensor, heads: Heads, rotary: Rotary, norms: tuple[Norm, Norm] | None
) -> tuple[Tensor, Tensor, Tensor]:
    weights: tuple[Tensor | None, Tensor | None] = (None, None)
    if norms is not None:
        weights = norms[0].weight, norms[1].weight
        for norm in norms:
            check_reaches(norm.sink, norm.weight, f"the weight of {type(norm).__name__}")
    found: tuple[Tensor, Tensor, Tensor] = _Prepared.apply(qkv, *weights, norms, heads, rotary)
    return found
