"""Norms of sequence-sharded tokens, or of the heads that a rank has. Every tp rank holds the whole weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.autocast import promoted
from tpkernels.derivatives import is_recorded, refuse_second_order
from tpkernels.exchange.communicator import Communicator
from tpkernels.launch import accumulation_dtype
from tpkernels.ops.norm.operator import norm_backward, norm_forward

from tpengine.layers.gradient_sink import GradientSink, check_reaches, total_of
from tpengine.layers.placement import Placement, whole


def _computed(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, norm: Norm, sinks: Sequence[GradientSink]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return y, total, the weight as it scales, and mean and rstd of each row; total is x itself without a residual."""
    factor = weight.to(accumulation_dtype(weight.dtype)) + norm.offset if norm.offset else weight
    y, total, mean, rstd = norm_forward(x, factor, bias, residual, norm.eps, norm.centered, len(sinks))
    return y, x if residual is None else total, factor, mean, rstd


class _Norm(torch.autograd.Function):
    """Local shapes: x, r, total, y[T/tp, D], w, b[D]; h = (total - mean) * rstd is the normalised input.

    forward:  total = x + r, or x without r;  rstd = (mean((total - mean)^2) + eps)^(-1/2);  y = h * w + b
    dgrad:    dx = dr = dtotal + rstd * (dy*w - h * mean(dy*w*h)), less its mean if the norm subtracts one
    wgrad:    dw = sum over this rank's tokens of dy*h, db = that of dy   partial(tp), into the sink

    A norm that does not subtract the mean has mean 0 here. With several sinks the tokens are cut into as many equal
    blocks: each sink gets the sum over its own block.

    Only total is kept; backward recomputes h. So one tensor is kept instead of two.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        norm: Norm,
        sinks: Sequence[GradientSink],
    ) -> tuple[Tensor, Tensor | None]:
        y, total, factor, mean, rstd = _computed(x, residual, weight, bias, norm, sinks)
        ctx.save_for_backward(total, factor, mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.norm, ctx.sinks, ctx.weight, ctx.bias = norm, sinks, weight, bias
        return y, None if residual is None else total

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_order("a tensor-parallel norm")
        total, factor, mean, rstd = ctx.saved_tensors
        norm, has_bias = ctx.norm, ctx.bias is not None
        # Sinks count: a weight whose y is not used contributes too.
        dy = torch.zeros_like(total) if dy is None else dy
        dx, sums = norm_backward(dy, dtotal, total, factor, mean, rstd, len(ctx.sinks), norm.centered, has_bias)
        found: list[Tensor | None] = [None, None]
        for i, (parameter, blocks) in enumerate(zip((ctx.weight, ctx.bias), sums, strict=False)):
            if ctx.needs_input_grad[2 + i]:
                given = zip(ctx.sinks, blocks, strict=True)
                found[i] = total_of([sink.add(parameter, block, norm.comm) for sink, block in given])
        of_x, of_residual = (dx if needed else None for needed in ctx.needs_input_grad[:2])
        return of_x, of_residual, *found, None, None


class _NormBeside(_Norm):
    """Local shapes: x, y[T/tp, D].  _Norm of x without a residual, and x itself, which another branch uses.

    dgrad:    dx = that of the x returned + that of the norm, in the norm's pass, instead of autograd's own addition
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return _Norm.forward(ctx, x, *rest)[0], x


class Norm(nn.Module):
    """A norm of rows: what RMSNorm, OffsetRMSNorm and LayerNorm have in common.

    Args:
        hidden_size: D, the elements of a row.
        comm: the tp ranks, which hold other rows of the same batch.
        eps: added to the mean square.
        sink: where the gradients go; default `.grad`, summed over tp at once.
        dtype, device: of the parameters, as torch.

    Numerics: statistics in promote_types(dtype, float32).
    """

    centered: ClassVar[bool] = False
    offset: ClassVar[float] = 0.0

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
        self.sink: GradientSink = sink or GradientSink()
        self.weight = Parameter(torch.full((hidden_size,), 1.0 - self.offset, dtype=dtype, device=device))
        self.bias: Parameter | None = None
        if self.centered:
            self.bias = Parameter(torch.zeros(hidden_size, dtype=dtype, device=device))

    def tp_placements(self) -> Mapping[str, Placement]:
        """See SaysPlacements: whole, and each rank's gradient is of its own rows."""
        return {"weight": whole(self.comm), "bias": whole(self.comm)}

    def forward(self, x: Tensor) -> Tensor:
        """x[T/tp, D] -> y[T/tp, D]."""
        return self.in_blocks(x, (self.sink,))

    # What `add` and `beside` do without calling the module: see model/block.py.
    plain_forward = forward

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x, residual[T/tp, D] -> (y, total)[T/tp, D], total = x + residual, in one pass."""
        y, total = self._normed(*promoted(x, residual), (self.sink,))
        return y, total

    def beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x[T/tp, D] -> (y, x)[T/tp, D]: where x has another use, use this x: its gradients are added in one pass."""
        y, x = self._normed(x, None, (self.sink,), _NormBeside)
        return y, x

    def in_blocks(self, x: Tensor, sinks: Sequence[GradientSink]) -> Tensor:
        """Return y[T, D]; each of the n sinks gets the gradients of its block of T/n rows, partial(comm).

        On a CPU no operation takes rows of two blocks: a block has the bits of a call of its own.
        """
        y: Tensor = self._normed(x, None, sinks)[0]
        return y

    def _normed(
        self,
        x: Tensor,
        residual: Tensor | None,
        sinks: Sequence[GradientSink],
        function: type[torch.autograd.Function] = _Norm,
    ) -> Any:
        weight, bias = self.weight, self.bias
        check_reaches(sinks[0], weight, f"the weight of {type(self).__name__}")
        if bias is not None:
            check_reaches(sinks[0], bias, f"the bias of {type(self).__name__}")
        if is_recorded():
            return function.apply(x, residual, weight, bias, self, sinks)
        y, total, *_ = _computed(x, residual, weight, bias, self, sinks)
        return y, total


class RMSNorm(Norm):
    """Scale each token to unit root mean square, after adding a residual if one is given.

        total[T/tp, D] = x + residual;   y[T/tp, D] = total / sqrt(mean(total^2) + eps) * w[D]

    Args, Numerics: as Norm.
    Source: Zhang and Sennrich, "Root mean square layer normalization", NeurIPS 2019.
    """


class OffsetRMSNorm(Norm):
    """RMSNorm whose weight is stored less one, as Gemma's: y = total / sqrt(mean(total^2) + eps) * (1 + w[D]).

    Args, Numerics: as Norm; 1 + w is not rounded to 16 bits.
    """

    offset = 1.0


class LayerNorm(Norm):
    """Shift and scale each token to mean 0 and variance 1, after adding a residual if one is given.

        total[T/tp, D] = x + residual;   y[T/tp, D] = (total - mean(total)) / sqrt(var(total) + eps) * w[D] + b[D]

    Args, Numerics: as Norm.
    Source: Ba, Kiros and Hinton, "Layer normalization", arXiv 1607.06450.
    """

    centered = True
