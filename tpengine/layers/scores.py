"""How scores are made: rotary positions of queries and keys, window and scale; the rotation on a CPU."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tpkernels.derivatives import differentiable_once, is_recorded
from tpkernels.ops.rope_tables import RopeScaling, rope_tables

from tpengine.layers.query_scaling import QueryScaling


@dataclass(frozen=True)
class Rotation:
    """Rotary frequencies.

    Attributes:
        theta: their base.
        scaling: changes them; None does not.
        size: R, the elements of a head that are rotated, the first ones; None for all.
        longer: a number of tokens, and the scaling in sequences of more; None for one scaling.
    """

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    size: int | None = None
    longer: tuple[int, RopeScaling] | None = None

    def scaling_of(self, seq: int) -> RopeScaling | None:
        """Return the scaling in sequences of `seq` tokens."""
        return self.longer[1] if self.longer is not None and seq > self.longer[0] else self.scaling


@dataclass(frozen=True)
class Scores:
    """How attention's scores are made: scale * rope(q) rope(k).T, over the keys that a query sees.

    Attributes:
        rotation: of queries and keys by their positions; None rotates nothing.
        window: how many tokens back a query sees, its own included; None for all.
        scale: default E^(-1/2).
        queries: what queries are multiplied by besides, by their positions; None for nothing.
    """

    rotation: Rotation | None = Rotation()
    window: int | None = None
    scale: float | None = None
    queries: QueryScaling | None = None


@functools.lru_cache(maxsize=16)
def tables_of(
    seq: int, head_size: int, rotation: Rotation, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [S, R/2], of each position's angles; R is E, or what the rotation says."""
    # The tables serve all modes: what is made under inference_mode could not be saved for a later backward.
    with torch.inference_mode(False):
        scaling = rotation.scaling_of(seq)
        return rope_tables(seq, rotation.size or head_size, rotation.theta, scaling=scaling, dtype=dtype, device=device)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.to(cos.dtype)
    y = torch.empty(wide.shape, dtype=wide.dtype, device=wide.device)
    half = cos.shape[-1]
    pairs = [half, half, x.shape[-1] - 2 * half]
    low, high, kept = wide.split(pairs, dim=-1)
    y_low, y_high, y_kept = y.split(pairs, dim=-1)
    y_kept.copy_(kept)
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

        y[.., i] = x[.., i] cos - x[.., i+R/2] sin;  y[.., i+R/2] = x[.., i+R/2] cos + x[.., i] sin;  R is mostly E

    Args:
        x: any strides. What is behind the first R elements of a head stays.
        cos, sin: [S, R/2], constant.

    Source: Su et al., "RoFormer", arXiv 2104.09864, section 3.4.
    """
    if not is_recorded():
        return _rotated(x, cos, sin)
    y: Tensor = _Rope.apply(x, cos, sin)
    return y
