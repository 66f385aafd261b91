"""A tensor times a number, of which nothing is kept: what some architectures multiply rows and sums by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from tpkernels.derivatives import differentiable_once, is_recorded


class _Scaled(torch.autograd.Function):
    """Local shapes: x, y[t, D] of any t.  y = factor x;  dx = factor dy.

    torch's own product keeps the factor, as a tensor of each call.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy * ctx.factor, None


def scaled(x: Tensor, factor: float) -> Tensor:
    """Return factor x, rounded once; x itself where the factor is 1.

    Args:
        x: any shape, floating point.
        factor: not rounded to x's dtype before.
    """
    if factor == 1.0:
        return x
    if not is_recorded():
        return x * factor
    y: Tensor = _Scaled.apply(x, factor)
    return y
