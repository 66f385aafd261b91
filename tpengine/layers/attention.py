"""Grouped-query self-attention, its heads cut over tp, with rotary position embedding."""

from __future__ import annotations

import functools
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from tpkernels.derivatives import differentiable_once
from tpkernels.ops.attention import attention_qkv, has_kernel
from tpkernels.ops.attention.host import AttentionDropout, causal_attention
from tpkernels.ops.rope import rope_tables

from tpengine.layers.collectives import Communicator
from tpengine.layers.dropout import Dropout
from tpengine.layers.gradient_sink import GradientSink, accumulation_dtype
from tpengine.layers.linear import ColumnParallelLinear, PackedWeights, RowParallelLinear


@functools.lru_cache(maxsize=16)
def tables_of(
    seq: int, head_size: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [S, E/2], of each position's angles."""
    return rope_tables(seq, head_size, theta, dtype=dtype, device=device)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.to(cos.dtype)
    y = torch.empty(wide.shape, dtype=wide.dtype, device=wide.device)
    low, high = wide.chunk(2, dim=-1)
    y_low, y_high = y.chunk(2, dim=-1)
    torch.mul(low, cos, out=y_low).addcmul_(high, sin, value=-1)
    torch.mul(high, cos, out=y_high).addcmul_(low, sin)
    return y.to(x.dtype)


class _Rope(torch.autograd.Function):
    """x[B, H, S, E] -> y, rotated by the positions' angles;  dx = dy, rotated back.

    Four passes write y in place. What autograd would record for the equation is half of a step's elementwise work.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(dy, cos, -sin), None, None


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x[B, H, S, E] by its position, half-split convention (as Hugging Face's Llama).

        y[.., i] = x[.., i] cos - x[.., i+E/2] sin;  y[.., i+E/2] = x[.., i+E/2] cos + x[.., i] sin

    Args:
        x: any strides.
        cos, sin: [S, E/2], constant.

    Source: Su et al., "RoFormer", arXiv 2104.09864, section 3.4.
    """
    y: Tensor = _Rope.apply(x, cos, sin)
    return y


def attend(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    seq: int,
    rope_theta: float,
    dropout: AttentionDropout | None,
) -> Tensor:
    """Rotate q and k by their positions, then attend causally within each sequence.

        q[T, H*E], k[T, G*E], v[T, G*E] = the columns of qkv, side by side
        y[T, H*E] = softmax(rope(q) rope(k).T / sqrt(E), causal) v

    Args:
        qkv: [T, (H + 2G) * E], rows of whole sequences, batch first.
        num_heads, num_kv_heads: H and G of this rank.
        seq: S, the number of tokens per sequence.
        rope_theta: base of the rotary frequencies.
        dropout: drops attention probabilities; None drops none.
    """
    head_size = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    cos, sin = tables_of(seq, head_size, rope_theta, accumulation_dtype(qkv.dtype), qkv.device)
    if has_kernel(qkv, head_size):
        return attention_qkv(qkv, num_heads, num_kv_heads, seq=seq, cos=cos, sin=sin, dropout=dropout)
    # On a CPU matmuls are faster when each head is contiguous. The rotation writes q and k that way at no extra cost.
    # v is copied too: otherwise it would be a view that keeps all of qkv until backward.
    parts = qkv.split([n * head_size for n in (num_heads, num_kv_heads, num_kv_heads)], dim=1)
    q, k, v = (rearrange(part, "(b s) (h e) -> b h s e", s=seq, e=head_size) for part in parts)
    mixed = causal_attention(
        rope(q, cos, sin), rope(k, cos, sin), v.clone(memory_format=torch.contiguous_format), dropout
    )
    return rearrange(mixed, "b h s e -> (b s) (h e)")


class Attention(nn.Module):
    """Causal self-attention over H query heads and G key/value heads.

        q, k, v = all_gather_tp(x[T/tp, D]) @ (wq, wk, wv).T       one gather, one GEMM
        y[T/tp, D] = reduce_scatter_tp(softmax(q k.T / sqrt(E), causal) v @ wo.T)

    Args:
        hidden_size, num_heads, num_kv_heads: D, H, G, global; H divisible by G and by tp.
        comm: the tp ranks.
        replicas: with G < tp, the communicator of the tp/G consecutive ranks that share a KV head.
        rope_theta: base of the rotary frequencies.
        dropout: drops attention probabilities.
        sink, gathers_again, dtype, device: as ColumnParallelLinear.

    Raises:
        ValueError: heads that do not divide.

    Shape: x [T/tp, D] with T = batch * seq, batch first. Positions start at 0 in every sequence.
    Cost: keeps gathered x, rotated q and k, v and the attention output for backward.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        comm: Communicator,
        *,
        replicas: Communicator | None = None,
        rope_theta: float = 10000.0,
        dropout: Dropout | None = None,
        sink: GradientSink | None = None,
        gathers_again: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads or num_heads % num_kv_heads or num_heads % comm.size:
            raise ValueError(
                "hidden_size must be divisible by num_heads, num_heads by num_kv_heads and by tp: "
                f"hidden_size {hidden_size}, num_heads {num_heads}, num_kv_heads {num_kv_heads}, tp {comm.size}: "
                "use num_heads a multiple of num_kv_heads and tp that divides hidden_size"
            )
        share = comm.size // num_kv_heads
        if (replicas.size if replicas else 1) != max(1, share) or (
            comm.size % num_kv_heads and num_kv_heads % comm.size
        ):
            raise ValueError(
                "num_kv_heads must be divisible by tp, or tp by num_kv_heads, where replicas are the ranks of one "
                f"head: num_kv_heads {num_kv_heads}, tp {comm.size}, replicas {replicas.size if replicas else None}: "
                f"use num_kv_heads {comm.size}, or replicas of {max(1, share)} consecutive ranks"
            )
        self.head_size = hidden_size // num_heads
        self.rope_theta, self.dropout = rope_theta, dropout
        kv_size = num_kv_heads * self.head_size
        options: dict[str, Any] = dict(sink=sink, gathers_again=gathers_again, dtype=dtype, device=device)
        self.q_proj = ColumnParallelLinear(hidden_size, hidden_size, comm, **options)
        self.k_proj = ColumnParallelLinear(hidden_size, kv_size, comm, replicas=replicas, **options)
        self.v_proj = ColumnParallelLinear(hidden_size, kv_size, comm, replicas=replicas, **options)
        self.o_proj = RowParallelLinear(hidden_size, hidden_size, comm, **options)
        self._qkv = PackedWeights(self.q_proj, self.k_proj, self.v_proj)

    def forward(self, x: Tensor, seq: int) -> Tensor:
        """x[T/tp, D] -> y[T/tp, D], attention within each of the T/seq sequences."""
        num_tokens = x.shape[0] * self.o_proj.comm.size
        if num_tokens % seq:
            raise ValueError(
                f"tokens must be whole sequences: {num_tokens} tokens over all ranks, seq {seq}: use "
                f"{-(-num_tokens // seq) * seq} tokens"
            )
        comm = self.o_proj.comm
        heads, kv_heads = (len(layer.weight) // self.head_size for layer in (self.q_proj, self.k_proj))
        drop = self.dropout.of_heads(comm.rank * heads, comm.size * heads) if self.dropout else None
        qkv = self._qkv.forward_packed(x)
        y: Tensor = self.o_proj(attend(qkv, heads, kv_heads, seq, self.rope_theta, drop))
        return y

    def prepare(self, num_tokens: int) -> None:
        """Prepare all weights: see ColumnParallelLinear.prepare."""
        self._qkv.prepare(num_tokens)
        self.o_proj.prepare(num_tokens)

    def release(self) -> None:
        """Release all prepared weights: see ColumnParallelLinear.release."""
        self._qkv.release()
        self.o_proj.release()
