"""Causal attention on the CPU: torch's flash forward, and a backward in blocks of keys.

torch's own backward multiplies small blocks head by head, which leaves much of a core unused. Here a block of keys
meets all later queries, of all sequences and heads, in one batched product (rows attention/... of benchmarks/results).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Of 32, 64 and 128 the fastest, or not slower by more than 2 %, for sequences of 128 to 1024.
_KEYS_A_BLOCK = 32


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to the tokens up to one's own, within each sequence.

        y[B, H, S, E] = softmax(q k.T / sqrt(E), causal) v,   k and v [B, G, S, E] repeated H/G times

    Args:
        q, k, v: any strides, H divisible by G.

    Returns:
        y, laid out as [B, S, H, E].

    Cost: 2*B*H*S*S*E flops forward, 2.5 times that backward; keeps q, k, v, y and B*H*S elements. Extra memory in
    backward: 2*B*H*32*S elements. Other than float32 and float64 on a CPU, and G < H, is left to torch.
    Source: Dao et al., "FlashAttention", arXiv 2205.14135, section 3.1 (backward from the saved log-sum-exp).
    """
    is_ours = q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64) and q.shape == k.shape
    if not is_ours or not q.numel() or torch.compiler.is_compiling():
        by_torch = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return by_torch.to(q.dtype)  # autocast computes it in another one
    y: Tensor = _CausalAttention.apply(q, k, v)
    return y


class _CausalAttention(torch.autograd.Function):
    """y = p v with p = exp(q k.T / sqrt(E) - lse), causal, of every sequence and head.

        dv = p.T dy;   ds = p * (dy v.T - sum(dy * y));   dq = ds k / sqrt(E);   dk = ds.T q / sqrt(E)

    p is computed again in backward, a block of keys at a time.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        ctx.save_for_backward(q, k, v, y, lse)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, y, lse = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            return _CausalAttention._in_own_dtype(q, k, v, y, lse, dy)

    @staticmethod
    def _in_own_dtype(
        q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, dy: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = [t.flatten(0, 1) for t in (q, k, v, dy, lse.unsqueeze(3), (dy * y).sum(-1, keepdim=True))]
        dq, dk, dv = _backward(*heads)
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, lse: Tensor, mean_slope: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of heads [B*H, S, E], from their lse and mean_slope = sum(dy * y) [B*H, S, 1]."""
    seq, size = q.shape[1:]
    scale = size**-0.5
    q = q * scale
    dq, dk, dv = torch.empty_like(q), k.new_empty(k.shape), v.new_empty(v.shape)
    future = q.new_full((_KEYS_A_BLOCK, _KEYS_A_BLOCK), -torch.inf).triu_(1)
    for first in range(0, seq, _KEYS_A_BLOCK):
        last = min(first + _KEYS_A_BLOCK, seq)
        block, later, num_keys = slice(first, last), slice(first, None), last - first
        # Queries before the block see none of its keys; of those inside it some see some.
        p = torch.bmm(q[:, later], k[:, block].transpose(1, 2)).sub_(lse[:, later])
        p[:, :num_keys].add_(future[:num_keys, :num_keys])
        p.exp_()
        dv[:, block] = torch.bmm(p.transpose(1, 2), dy[:, later])
        ds = torch.bmm(dy[:, later], v[:, block].transpose(1, 2)).sub_(mean_slope[:, later]).mul_(p)
        dk[:, block] = torch.bmm(ds.transpose(1, 2), q[:, later])
        if first == 0:
            torch.bmm(ds, k[:, block], out=dq)
        else:
            dq[:, later] += torch.bmm(ds, k[:, block])
    return dq.mul_(scale), dk, dv
