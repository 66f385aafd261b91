"""Causal attention on the CPU: torch's flash forward, and a backward in blocks of keys; dropout of its probabilities.

torch's own backward multiplies small blocks head by head, which does not use a core fully. Here one block of keys and
all later queries, of all sequences and heads, are one batched product (rows attention/... of benchmarks/results). With
dropout torch has no fast form on a CPU and no mask that is independent of how heads are cut: so forward uses the same
blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels.derivatives import differentiable_once
from tpkernels.ops.dropout import DropoutStream, keep_at

# Of 32, 64 and 128 the fastest, or at most 2 % slower than the fastest, for sequences of 128 to 1024.
_KEYS_PER_BLOCK = 32


@dataclass(frozen=True)
class AttentionDropout:
    """Which attention probabilities are dropped: it depends on sequence, head, query and key, not on the heads here.

        row of (b, h, query) = (b * num_heads + first_head + h) * S + query;   columns are the keys, row_length is S

    Args:
        stream: what the mask depends on besides the position.
        first_head: global number of the first of the given query heads.
        num_heads: query heads of the whole layer.
    """

    stream: DropoutStream
    first_head: int
    num_heads: int

    def check(self, num_given: int) -> None:
        """Raise ValueError unless the given heads are heads of the layer."""
        if not 0 <= self.first_head <= self.first_head + num_given <= self.num_heads:
            raise ValueError(
                f"heads must be some of the layer's {self.num_heads}: {self.stream.site} has {num_given} from "
                f"{self.first_head} on: pass the layer's number of query heads, and the first one's place"
            )

    def rows(self, q: Tensor) -> Tensor:
        """Return the mask's row for every query of q[B, H, S, E]: int64 [B, H, S]."""
        batch, heads, seq = (torch.arange(size, device=q.device) for size in q.shape[:3])
        first = (batch[:, None] * self.num_heads + self.first_head + heads) * len(seq)
        return first[:, :, None] + seq


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: AttentionDropout | None = None) -> Tensor:
    """Attend to the tokens up to the query's own, within each sequence.

        y[B, H, S, E] = drop(softmax(q k.T / sqrt(E), causal)) v,   k and v [B, G, S, E] repeated H/G times

    Args:
        q, k, v: any strides, H divisible by G.
        dropout: drop(p) = p / (1 - rate) where kept, else 0; by default, and at rate 0, nothing is dropped.

    Returns:
        y, in memory as [B, S, H, E], unless torch computes it.

    Raises:
        ValueError: heads outside the layer's.

    Cost: 2*B*H*S*S*E flops forward, 2.5 times that backward; keeps q, k, v, y and B*H*S elements. Extra memory in
    backward: 2*B*H*32*S elements. Dtypes other than float32 and float64 on a CPU, and G < H, are left to torch.
    With dropout: twice the flops forward; keeps q, k and v widened to float32, with k and v repeated to H heads; draws
    the mask in forward and again in backward, 0.010 s each per 10**6 of its B*H*S*S/2 elements on one core. On other
    devices every score is written out.
    Numerics: with dropout, products and sums in float32, or float64 for float64, with one rounding to q's dtype. A
    head's bits do not depend on which other heads are given.
    Source: Dao et al., "FlashAttention", arXiv 2205.14135, section 3.1 (backward from the saved log-sum-exp).
    """
    is_blocked = q.device.type == "cpu" and q.numel() > 0 and not torch.compiler.is_compiling()
    if dropout is not None and dropout.stream.rate > 0:
        return attention_with_dropout(q, k, v, dropout, is_blocked)
    if not is_blocked or q.dtype not in (torch.float32, torch.float64) or q.shape != k.shape:
        by_torch = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return by_torch.to(q.dtype)  # under autocast it is computed in another dtype
    y: Tensor = _CausalAttention.apply(q, k, v, None)
    return y


def attention_with_dropout(q: Tensor, k: Tensor, v: Tensor, dropout: AttentionDropout, is_blocked: bool) -> Tensor:
    """Return causal attention with dropout; without `is_blocked` every score is in memory."""
    dropout.check(q.shape[1])
    with torch.autocast(q.device.type, enabled=False):
        wide = torch.promote_types(q.dtype, torch.float32)
        if k.shape[1] != q.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        attend = _CausalAttention.apply if is_blocked else _written_out
        y: Tensor = attend(q.to(wide), k.to(wide), v.to(wide), dropout)
        return y.to(q.dtype)


def _written_out(q: Tensor, k: Tensor, v: Tensor, dropout: AttentionDropout) -> Tensor:
    """Compute the equation with every score in memory: on other devices, and under torch.compile."""
    seq = q.shape[2]
    future = torch.ones(seq, seq, dtype=torch.bool, device=q.device).triu(1)
    p = (q @ k.transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(future, -torch.inf).softmax(-1)
    keep = keep_at(dropout.stream, dropout.rows(q), 0, seq, seq)
    return torch.where(keep, p / (1 - dropout.stream.rate), 0) @ v


class _CausalAttention(torch.autograd.Function):
    """y = drop(p) v with p = exp(q k.T / sqrt(E) - lse), causal, of every sequence and head.

        dv = drop(p).T dy;   ds = p * (drop(dy v.T) - sum(dy * y));   dq = ds k / sqrt(E);   dk = ds.T q / sqrt(E)

    Backward recomputes p, one block of keys at a time, and draws its mask again. sum(dy * y) is the mean of a row's
    slopes, as without dropout: sum over keys of p * drop(dy v.T) = sum over keys of drop(p) * dy v.T.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropout: AttentionDropout | None) -> Tensor:
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        if dropout is not None:
            # Flash attention's y is not used; it is the cheapest way to get lse.
            y = _forward_with_dropout(q, k, v, lse, _Mask(dropout, q))
        # Heads side by side, as the next product reads and keeps it: so only one tensor is kept.
        y = y.transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.dropout = dropout
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            return *_CausalAttention._in_own_dtype(q, k, v, y, lse, dy, ctx.dropout), None

    @staticmethod
    def _in_own_dtype(
        q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, dy: Tensor, dropout: AttentionDropout | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = [t.flatten(0, 1) for t in (q, k, v, dy, lse.unsqueeze(3), (dy * y).sum(-1, keepdim=True))]
        dq, dk, dv = _backward(*heads, mask=None if dropout is None else _Mask(dropout, q))
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


class _Mask:
    """The mask of attention probabilities, drawn a block of queries and keys at a time, for all heads [B*H]."""

    def __init__(self, dropout: AttentionDropout, q: Tensor) -> None:
        self.stream, self.scale = dropout.stream, 1 / (1 - dropout.stream.rate)
        self.rows = dropout.rows(q).flatten(0, 1)

    def of(self, queries: slice, keys: slice) -> Tensor:
        """Return 1 where kept: uint8 [B*H, queries, keys]; as a factor it is three times as fast as bool."""
        seq = self.rows.shape[1]
        return keep_at(self.stream, self.rows[:, queries], keys.start, keys.stop - keys.start, seq).view(torch.uint8)


def _probabilities(q: Tensor, k: Tensor, lse: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield a block of keys, the queries that see any of it, and their p; tensors of heads are [B*H, S, E].

    q is already scaled by 1 / sqrt(E). Queries before the block see none of its keys; those inside it see some.
    """
    seq = q.shape[1]
    future = q.new_full((_KEYS_PER_BLOCK, _KEYS_PER_BLOCK), -torch.inf).triu_(1)
    for first in range(0, seq, _KEYS_PER_BLOCK):
        last = min(first + _KEYS_PER_BLOCK, seq)
        block, later, num_keys = slice(first, last), slice(first, seq), last - first
        p = torch.bmm(q[:, later], k[:, block].transpose(1, 2)).sub_(lse[:, later])
        p[:, :num_keys].add_(future[:num_keys, :num_keys])
        yield block, later, p.exp_()


def _forward_with_dropout(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, mask: _Mask) -> Tensor:
    """Return y[B, H, S, E], in memory as [B, S, H, E], from the lse [B, H, S] of what is not yet dropped."""
    batch, heads, seq, size = q.shape
    total = torch.zeros(batch * heads, seq, size, dtype=q.dtype)
    q, k, v, lse = (t.flatten(0, 1) for t in (q * size**-0.5, k, v, lse.unsqueeze(3)))
    for block, later, p in _probabilities(q, k, lse):
        total[:, later] += torch.bmm(p.mul_(mask.of(later, block)), v[:, block])
    y = torch.empty(batch, seq, heads, size, dtype=q.dtype).transpose(1, 2)
    return torch.mul(total.view(batch, heads, seq, size), mask.scale, out=y)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, lse: Tensor, mean_slope: Tensor, *, mask: _Mask | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of heads [B*H, S, E], from their lse and mean_slope = sum(dy * y) [B*H, S, 1]."""
    scale = q.shape[2] ** -0.5
    q = q * scale
    if mask is not None:
        dy = dy * mask.scale
    dq, dk, dv = torch.empty_like(q), k.new_empty(k.shape), v.new_empty(v.shape)
    for block, later, p in _probabilities(q, k, lse):
        dp, dropped = torch.bmm(dy[:, later], v[:, block].transpose(1, 2)), p
        if mask is not None:
            keep = mask.of(later, block)
            dp, dropped = dp.mul_(keep), p * keep
        dv[:, block] = torch.bmm(dropped.transpose(1, 2), dy[:, later])
        ds = dp.sub_(mean_slope[:, later]).mul_(p)
        dk[:, block] = torch.bmm(ds.transpose(1, 2), q[:, later])
        if block.start == 0:
            torch.bmm(ds, k[:, block], out=dq)
        else:
            dq[:, later] += torch.bmm(ds, k[:, block])
    return dq.mul_(scale), dk, dv
