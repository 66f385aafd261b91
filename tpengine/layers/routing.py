"""Which experts a token goes to: the router of a mixture of experts, and how its choice is kept.

    logits[T, E] = X[T, D] @ w[E, D].T                     in promote_types(dtype, float32), whole on every rank
    experts, weights[T, k] = choose(logits)                tpkernels.ops.experts.route
    order[T k], offsets[E + 1] = sort_by_expert(experts)   tpkernels.ops.experts.order

Every tp rank has all tokens X and the whole weight, and does the same operations: the ranks choose the same experts
without telling each other. What comes back is a part on each rank: an expert's width is cut, and dweights[T, k] is the
sum over this rank's columns. All behind it is linear, so that dlogits, dw and dX are parts too. dw is summed where the
gradients of norms are (partial(tp)), dX where that of any column-parallel layer is.

A choice is made once. Backward uses what forward has kept; where backward computes a block or a chunk again
(`--parallel.recompute`), `same_routing` hands it the experts of the first time: logits that differ in a last bit would
send a token elsewhere, and its gradient would belong to other weights than the loss.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.derivatives import is_recorded, refuse_second_order
from tpkernels.exchange.communicator import Communicator
from tpkernels.launch import accumulation_dtype
from tpkernels.ops.matmul.host import product

from tpengine.layers.gradient_sink import GradientSink, check_reaches
from tpengine.layers.placement import Placement, whole
from tpengine.layers.plain_experts import choose, sort_by_expert


class Selection(NamedTuple):
    """How experts are chosen: the arguments of tpkernels.ops.experts.route.

    Attributes:
        k: experts of a token.
        scoring: softmax over all experts, or the sigmoid of each logit.
        normalize: whether the k weights of a token are divided by their sum.
        scale: what they are multiplied by then.
        num_groups, top_groups: experts lie in so many groups, and a token's are in the best so many of them.
    """

    k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1


class Routed(NamedTuple):
    """Where the rows of a micro-batch go.

    Attributes:
        experts: int32 [T, k], each token's in the order of its choice.
        weights: [T, k] in promote_types(dtype, float32).
        order: int32 [T k]; row r of the sorted rows is choice order[r] % k of token order[r] // k.
        offsets: int32 [E + 1]; rows offsets[e] to offsets[e + 1] are of expert e.
    """

    experts: Tensor
    weights: Tensor
    order: Tensor
    offsets: Tensor


class _Scores(torch.autograd.Function):
    """Local shapes: X[T, D], w[N, D], y[T, N]; a is promote_types(dtype, float32).

    forward:  y = a(X) @ a(w).T
    dgrad:    dX = dy @ a(w), in X's dtype
    wgrad:    dw = dy.T @ a(X), partial(comm), into the sink
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: TokenScores) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.comm, ctx.sink = weight, layer.comm, layer.sink
        return _scores(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("a router")
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = product(dy, weight.to(dy.dtype)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = ctx.sink.add(ctx.parameter, product(dy.T, x.to(dy.dtype)), ctx.comm)
        return dx, dw, None


def _scores(x: Tensor, weight: Tensor) -> Tensor:
    wide = accumulation_dtype(x.dtype)
    return product(x.to(wide), weight.to(wide).T)


class TokenScores(nn.Module):
    """Scores of every token by a weight that all ranks hold whole, and behind which all is a part of a sum.

        y[T, N] = X[T, D] @ w[N, D].T        in promote_types(dtype, float32)
        dX = dy @ w;  dw = dy.T @ X          of dy partial(tp): both are parts, dw is summed over tp by its sink

    Args:
        hidden_size, num_scores: D and N.
        comm: the tp ranks. Construction is collective: all take the first one's weight.
        sink, dtype, device: as ColumnParallelLinear.

    Cost: 2*T*N*D flops on every rank; keeps X.
    """

    def __init__(
        self,
        hidden_size: int,
        num_scores: int,
        comm: Communicator,
        *,
        sink: GradientSink | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.comm = comm
        self.sink: GradientSink = sink or GradientSink()
        self.weight = Parameter(torch.empty(num_scores, hidden_size, dtype=dtype, device=device))
        nn.init.normal_(self.weight, std=hidden_size**-0.5)
        if not self.weight.is_meta:
            # Every rank holds the whole weight, whatever each generator drew.
            comm.broadcast_(self.weight.detach())

    def tp_placements(self) -> Mapping[str, Placement]:
        """See SaysPlacements: whole, and each rank's gradient is the part that comes of its columns of the experts."""
        return {"weight": whole(self.comm)}

    def forward(self, x: Tensor) -> Tensor:
        """X[T, D] -> y[T, N]."""
        weight = self.weight
        check_reaches(self.sink, weight, "a router's weight")
        if not is_recorded():
            return _scores(x, weight)
        y: Tensor = _Scores.apply(x, weight, self)
        return y


class Router(TokenScores):
    """Chooses k of E experts for every token.

    Args:
        hidden_size, num_experts, comm, sink, dtype, device: as TokenScores.
        selection: how they are chosen.

    Cost: 2*T*E*D flops on every rank, beside the experts' 6*T*k*F*D/tp.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, comm: Communicator, selection: Selection, **options: Any
    ) -> None:
        super().__init__(hidden_size, num_experts, comm, **options)
        self.selection = selection

    def routed(self, x: Tensor) -> Routed:
        """Return where the rows of X[T, D] go; within `same_routing` where they went the first time."""
        logits = self(x)
        experts, weights = choose(logits, **self.selection._asdict())
        order, offsets = sort_by_expert(experts, len(self.weight))
        return Routed(experts, weights, order, offsets)
