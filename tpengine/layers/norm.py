"""RMSNorm on sequence-sharded tokens. Every tp rank holds the whole weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.derivatives import refuse_second_order
from tpkernels.ops.norm.operator import norm_backward, norm_forward

from tpengine.layers.collectives import Communicator
from tpengine.layers.gradient_sink import GradientSink, ParamGradSink


class _RMSNorm(torch.autograd.Function):
    """Local shapes: x[T/tp, D], w[D], y[T/tp, D]; h = x * rstd is the normalised input.

    forward:  rstd = (mean(x^2) + eps)^(-1/2);  y = x * rstd * w
    dgrad:    dx = rstd * (dy*w - h * mean(dy*w*h))
    wgrad:    dw = sum over this rank's tokens of dy*h   partial(tp), into the sink

    With several sinks the tokens are cut into as many equal blocks: each sink gets the sum over its own block.

    Only x is kept; backward recomputes h. So one tensor is kept instead of two.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Parameter, eps: float, comm: Communicator, sinks: Sequence[GradientSink]
    ) -> Tensor:
        y, _, mean, rstd = norm_forward(x, weight, None, None, eps, False, len(sinks))
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.comm, ctx.sinks, ctx.parameter = comm, sinks, weight
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("a tensor-parallel norm")
        x, weight, mean, rstd = ctx.saved_tensors
        dx, sums = norm_backward(dy, None, x, weight, mean, rstd, len(ctx.sinks), False, False)
        if ctx.parameter.requires_grad:
            for sink, dw in zip(ctx.sinks, sums[0], strict=True):
                sink.add(ctx.parameter, dw, ctx.comm)
        return dx if ctx.needs_input_grad[0] else None, None, None, None, None


class _AddRMSNorm(torch.autograd.Function):
    """Local shapes: x, r, total, y[T/tp, D], w[D].

    forward:  total = x + r;  y = rms_norm(total)       in one pass
    dgrad:    dx = dr = dtotal + what dy gives to total
    wgrad:    as _RMSNorm
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Parameter, eps: float, comm: Communicator, sink: GradientSink
    ) -> tuple[Tensor, Tensor]:
        y, total, mean, rstd = norm_forward(x, weight, None, residual, eps, False)
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.comm, ctx.sink, ctx.parameter = comm, sink, weight
        return y, total

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("a tensor-parallel norm")
        total, weight, mean, rstd = ctx.saved_tensors
        dx, sums = norm_backward(dy, dtotal, total, weight, mean, rstd, 1, False, False)
        if ctx.parameter.requires_grad:
            ctx.sink.add(ctx.parameter, sums[0, 0], ctx.comm)
        of_x, of_residual = (dx if needed else None for needed in ctx.needs_input_grad[:2])
        return of_x, of_residual, None, None, None, None


def rms_norm(x: Tensor, weight: Parameter, eps: float, comm: Communicator, sinks: Sequence[GradientSink]) -> Tensor:
    """Return y[T, D] = x / sqrt(mean(x^2) + eps) * w[D].

    Each of the n sinks gets dw summed over its block of T/n tokens, partial(comm). On a CPU no operation takes tokens
    of two blocks: a block has the bits of a call of its own.
    """
    y: Tensor = _RMSNorm.apply(x, weight, eps, comm, sinks)
    return y


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Parameter, eps: float, comm: Communicator, sink: GradientSink
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(total), total)[T, D], where total = x + residual."""
    y, total = _AddRMSNorm.apply(x, residual, weight, eps, comm, sink)
    return y, total


class RMSNorm(nn.Module):
    """Scale each token to unit root mean square, after adding a residual if one is given.

        total[T/tp, D] = x + residual;   y[T/tp, D] = total / sqrt(mean(total^2) + eps) * w[D]

    Args:
        hidden_size: D.
        comm: the tp ranks, which hold other tokens of the same batch.
        eps: added to the mean square.
        sink: where the weight gradient goes; default `weight.grad`, summed over tp at once.
        dtype, device: of the weight, as torch.

    Numerics: statistics in promote_types(dtype, float32).
    Source: Zhang and Sennrich, "Root mean square layer normalization", NeurIPS 2019.
    """

    def __init__(
        self,
        hidden_size: int,
        comm: Communicator,
        *,
        eps: float = 1e-5,
        sink: GradientSink | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.comm, self.eps = comm, eps
        self.sink: GradientSink = sink or ParamGradSink()
        self.weight = Parameter(torch.ones(hidden_size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """x[T/tp, D] -> y[T/tp, D]."""
        return rms_norm(x, self.weight, self.eps, self.comm, (self.sink,))

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x, residual[T/tp, D] -> (y, total)[T/tp, D], in one pass."""
        return add_rms_norm(x, residual, self.weight, self.eps, self.comm, self.sink)
