"""Whether torch's attention takes the place of ours: where it was timed on this kind of GPU, and won.

It rounds otherwise than our kernels, and its backward may add in another order on each run. So it is never taken where
torch is to be deterministic; callers leave it out for what it does not compute (windows, documents, dropout by
position) and in exact mode. Whoever trains is told once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tpkernels.launch import constant_while_traced
from tpkernels.ops.matmul.tuned import OURS, TunedAttention, path_for, tuned_attention

BACKENDS: Mapping[str, SDPBackend] = MappingProxyType(
    {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "math": SDPBackend.MATH,
    }
)


def chosen_backend(x: Tensor, seq: int, heads: int, kv_heads: int, head_size: int) -> str | None:
    """Return torch's backend if it is the fastest causal attention, and print so once; None for our kernels.

    Args:
        x: an operand, for its dtype and device.
        seq: tokens of each sequence.
        heads, kv_heads, head_size: H, G and E of this rank.

    Raises:
        ValueError: the file of what was timed on this GPU is wrong.
    """
    if torch.are_deterministic_algorithms_enabled():
        return None
    return _winner(x.device, x.dtype, seq, heads, kv_heads, head_size)


@constant_while_traced
def _winner(
    device: torch.device, dtype: torch.dtype, seq: int, heads: int, kv_heads: int, head_size: int
) -> str | None:
    found = tuned_attention(device, dtype, seq, heads, kv_heads, head_size)
    if found is None or found.winner == OURS:
        return None
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    _say(found, path_for(gpu).name)
    return found.winner


def attention_by_torch(q: Tensor, k: Tensor, v: Tensor, backend: str, scale: float | None = None) -> Tensor:
    """Attend causally by one of torch's backends: y[B, S, H, E] of q[B, S, H, E] and k, v[B, S, G, E].

    Args:
        backend: a key of BACKENDS.
        scale: of the scores; default 1 / sqrt(E).

    Numerics: the backend's; backward may differ from run to run.
    """
    groups = q.shape[2] != k.shape[2]
    q, k, v = (of.transpose(1, 2) for of in (q, k, v))
    with sdpa_kernel(BACKENDS[backend]):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=groups)
    return y.transpose(1, 2)


@functools.cache
def _say(found: TunedAttention, file: str) -> None:
    print(
        f"tpkernels: attention of {found.heads} heads, {found.kv_heads} for keys, of {found.head_size} and sequences "
        f"of about {found.seq} is torch's ({found.winner}): {found.us:g} us instead of {found.ours_us:g} by {file} of "
        f"{found.date}; gradients may differ from run to run: torch.use_deterministic_algorithms(True) takes ours",
        file=sys.stderr,
    )
