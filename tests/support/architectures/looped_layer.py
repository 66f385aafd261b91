"""The layer of looped_experts.py: every rank passes all tokens of its peers through the experts that it holds.

X[T, D], P[T, E] = all_gather(x[t, D], weights[t, E])             over the ep ranks; with ep 1 over tp
y[t, D] = reduce_scatter(sum over own experts e of P[:, e] * expert_e(X))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.functional import silu
from tpkernels.exchange.communicator import Communicator

from tpengine.architectures.describe import Experts
from tpengine.layers.collectives import gather, reduce_scatter
from tpengine.layers.dropout import Dropout
from tpengine.layers.gradient_sink import GradientSink
from tpengine.layers.placement import Placement, cut, whole
from tpengine.model.parts import FastParts


class _Given(torch.autograd.Function):
    """A weight, whose gradient goes to the sink."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, sink: GradientSink, partial: Communicator | None) -> Tensor:
        ctx.given = weight, sink, partial
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, None, None]:
        weight, sink, partial = ctx.given
        return sink.add(weight, dw, partial), None, None


class _Weight(nn.Module):
    """One weight, and how it lies."""

    def __init__(self, shape: tuple[int, ...], placement: Placement, options: dict[str, Any]) -> None:
        super().__init__()
        self.sink, self.placement = options["sink"] or GradientSink(), placement
        self.weight = Parameter(torch.empty(shape, dtype=options["dtype"], device=options["device"]))

    def tp_placements(self) -> dict[str, Placement]:
        """See SaysPlacements."""
        return {"weight": self.placement}


def _given(module: nn.Module) -> Tensor:
    """Return a weight, as products read it."""
    assert isinstance(module, _Weight)
    weight: Tensor = _Given.apply(module.weight, module.sink, module.placement.holders)
    return weight


class LoopedLayer(nn.Module):
    """x[T/tp, D] -> y[T/tp, D]."""

    def __init__(self, part: Experts, parts: FastParts) -> None:
        super().__init__()
        d, e, f, tp, shared = parts.model.hidden_size, part.num_experts, part.ffn_size, parts.tp, parts.experts_comm
        self.part, self.comm = part, tp if shared is None else shared
        e, f = (e, f // tp.size) if shared is None else (e // shared.size, f)
        # With ep 1 every rank has a share of all experts.
        self.first = 0 if shared is None else shared.rank * e

        def weight(shape: tuple[int, ...], dim: int) -> _Weight:
            return _Weight(shape, cut(tp, dim) if shared is None else cut(shared, 0), parts.options)

        self.gate = _Weight((part.num_experts, d), whole(tp), parts.options)
        self.experts = nn.ModuleDict(
            {"gate_proj": weight((e, f, d), 1), "up_proj": weight((e, f, d), 1), "down_proj": weight((e, d, f), 2)}
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ _given(self.gate).T).softmax(-1)
        chosen, experts = scores.topk(self.part.top_k)
        weights = torch.zeros_like(scores).scatter(1, experts, chosen / chosen.sum(-1, keepdim=True))
        x, weights = gather(x, self.comm), gather(weights, self.comm)
        gates, ups, downs = (_given(self.experts.get_submodule(f"{of}_proj")) for of in ("gate", "up", "down"))
        y = torch.zeros_like(x)
        for i, (gate, up, down) in enumerate(zip(gates, ups, downs, strict=True)):
            y = y + weights[:, self.first + i, None] * ((silu(x @ gate.T) * (x @ up.T)) @ down.T)
        return reduce_scatter(y, self.comm)

    def prepare(self, num_tokens: int) -> None:
        """See ColumnParallelLinear.prepare: a loop has no such form."""

    def release(self) -> None:
        """See prepare."""


def looped(part: Experts, parts: FastParts, dropout: Dropout | None) -> LoopedLayer:
    """Make the layer: what LoopedExperts.layer names."""
    return LoopedLayer(part, parts)
