"""Attention by one of torch's backends, for operands as ours takes them: choice.py says when.

Whole sequences take scaled_dot_product_attention; windows and packed documents torch.nn.attention.varlen, which calls
FlashAttention 2, or 3 or 4 where torch.nn.attention.activate_flash_attention_impl has put them in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

# Its signature differs between versions of torch: choice.py has looked at it.
_varlen: Callable[..., Tensor] = varlen_attn  # type: ignore[assignment]

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention_by_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    backend: str,
    scale: float | None = None,
    *,
    window: int | None = None,
    starts: Tensor | None = None,
    longest: int = 0,
) -> Tensor:
    """Attend causally by one of torch's backends: y[B, S, H, E] of q[B, S, H, E] and k, v[B, S, G, E].

    Args:
        backend: what choice.chosen_backend returned.
        scale: of the scores; default 1 / sqrt(E).
        window: how many keys back a query sees, its own included; None for all. For "varlen".
        starts: int32 [documents + 1] of packed documents, B = 1. For "varlen".
        longest: tokens of the longest document that there may be.

    Numerics: the backend's; backward may differ from run to run.
    """
    groups = q.shape[2] != k.shape[2]
    if backend == "varlen":
        if starts is None:
            # What a captured graph reads must be its own: others may replace what is kept here.
            is_captured = q.is_cuda and torch.cuda.is_current_stream_capturing()
            starts_of = _starts_of.__wrapped__ if is_captured else _starts_of
            starts, longest = starts_of(q.shape[0], q.shape[1], q.device), q.shape[1]
        options = {"enable_gqa": True} if groups else {}
        y = _varlen(
            *(of.flatten(0, 1) for of in (q, k, v)),
            starts,
            starts,
            longest,
            longest,
            scale=scale,
            # Keys to the left and to the right of a query's own.
            window_size=(-1 if window is None else window - 1, 0),
            **options,
        )
        return y.view(q.shape)
    assert window is None and starts is None, backend
    q, k, v = (of.transpose(1, 2) for of in (q, k, v))
    # cuDNN refuses one token, which sees itself alone: any backend returns v.
    backends = [_BACKENDS[backend], SDPBackend.MATH] if q.shape[2] == 1 else [_BACKENDS[backend]]
    with sdpa_kernel(backends):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=groups)
    return y.transpose(1, 2)


@functools.lru_cache(maxsize=16)
def _starts_of(batch: int, seq: int, device: torch.device) -> Tensor:
    """Return where whole sequences begin, as documents."""
    # They serve all modes: what is made under inference_mode could not be saved for a later backward.
    with torch.inference_mode(False):
        return torch.arange(0, (batch + 1) * seq, seq, dtype=torch.int32, device=device)
