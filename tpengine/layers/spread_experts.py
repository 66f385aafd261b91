"""A mixture of experts whose whole networks lie on N ranks: rows of tokens travel to them, and back.

    experts, weights[t, k], order = route(x[t, D])            routing.py; t = T/tp, each rank its own tokens
    routes = the counts of all N ranks                        tpkernels.exchange.experts: one wait for the host; or
                                                              row_buffers.py: by kernels, without
    Xs[R', D] = dispatch(x)                                   by expert, then by source rank, token and choice
    Hs[R', F], Ys[R', D]                                      experts.py: E/N whole experts
    y[t] = sum over j of weights[t, j] (row of Ys of (t, j))  combine: k terms in the order of the choice, by the owner
    y[t, D] += shared(x)                                      its width cut over tp, with exchanges of its own

The N ranks are those of tp, or of tp and some of dp: then replicas share experts, and no weight of an expert lies on
two of them. An expert's gradient is whole where the expert is: of the tokens of all N ranks. The router's is a part, of
this rank's tokens, as that of a norm's weight. An expert's rows lie in the order of the global tokens, so its bits do
not depend on N as far as those of its products do not depend on how the rows of other experts lie.

Routing and counts are kept where the layer is computed again: what is exchanged a second time are rows alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tpkernels.again import once
from tpkernels.autocast import lowered
from tpkernels.derivatives import differentiable_once, is_recorded
from tpkernels.exchange.arena import shard_rows
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.experts import Routes, exchange_counts
from tpkernels.fused.expert_rows import combine_gradients, rows_to_experts, rows_to_sums
from tpkernels.ops.experts.choose import ChoiceRule

from tpengine.layers.collectives import WholeRows
from tpengine.layers.experts import ExpertMixture, ExpertNetworks
from tpengine.layers.gradient_sink import GradientSink
from tpengine.layers.routing import Routed, Router
from tpengine.layers.row_buffers import RowBuffers
from tpengine.layers.whereabouts import says_where


@says_where
class _Dispatched(torch.autograd.Function):
    """Local shapes: x[t, D], Xs[R', D].  Xs = dispatch(x);  dx[t] = the sum of dXs' k rows of t, in their order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, routes: Routes, comm: Communicator) -> Tensor:
        ctx.routes, ctx.comm = routes, comm
        return rows_to_experts(x, routes, comm)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        dx, _ = rows_to_sums(drows.contiguous(), ctx.routes, ctx.comm, weighted=False, keeps=False)
        return dx, None, None


@says_where
class _SpreadCombined(torch.autograd.Function):
    """Local shapes: Ys[R', D], weights[t, k], y[t, D].

    forward:  y[t] = sum over j of weights[t, j] (row of Ys of (t, j))
    backward: dYs = weights * dy, at the experts' owner;  dweights[t, j] = <dy[t], row of Ys of (t, j)>
    """

    @staticmethod
    def forward(ctx: Any, ys: Tensor, weights: Tensor, routes: Routes, comm: Communicator) -> Tensor:
        y, returned = rows_to_sums(ys, replace(routes, weights=weights), comm, weighted=True, keeps=True)
        ctx.save_for_backward(returned, weights)
        ctx.routes, ctx.comm = routes, comm
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        returned, weights = ctx.saved_tensors
        routes = replace(ctx.routes, weights=weights)
        # Frozen experts over nothing that is trained need no gradient of their rows, which then stay where they are.
        of_rows, of_weights, *_ = ctx.needs_input_grad
        asked = {"of_rows": of_rows, "of_weights": of_weights}
        return *combine_gradients(dy.contiguous(), returned, routes, ctx.comm, **asked), None, None


class SpreadExperts(ExpertMixture):
    """Send every token to k of E feed-forward networks, of which each of N ranks has E / N whole ones.

        experts, weights[t, k] = route(x[t, D]), t = T/tp
        y[t, D] = sum over j of weights[t, j] expert(experts[t, j])(x_t) + shared(x_t)

    Args:
        hidden_size, ffn_size, num_experts: D, F of one expert, and E, global; E divisible by N.
        rule, has_bias, shared_size, shared_gated, gathers_again: as MixtureOfExperts.
        comm: the tp ranks, whose tokens are cut.
        experts_comm: the N ranks that share the experts: those of tp, or more.
        row_buffers: for the rows of this rank's experts, if kernels bring them; default: rows travel at their exact
            number.
        sink, dtype, device: as ColumnParallelLinear.

    Shape: x [T/tp, D], y [T/tp, D].

    Raises:
        ValueError: N does not divide E; k is more than E, or groups do not divide E.

    Cost: 6*R'*D*F flops, where R' is what this rank's experts get, T*k/tp on average; 2*T/tp*E*D for the router. Of
        T*k/tp rows (N - 1)/N are sent, and as many come back, on average (work_experts.py: dispatch_work,
        hottest_share). Keeps R'*D, 3*R'*F, and T*k/tp*D for the weights' gradient.
    Numerics: as MixtureOfExperts.
    Source: Lepikhin et al., "GShard", arXiv 2006.16668; without capacity, as in Gale et al., "MegaBlocks", arXiv
        2211.15841.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        rule: ChoiceRule,
        comm: Communicator,
        experts_comm: Communicator,
        *,
        row_buffers: RowBuffers | None = None,
        has_bias: bool = False,
        shared_size: int = 0,
        shared_gated: bool = False,
        sink: GradientSink | None = None,
        gathers_again: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        options: dict[str, Any] = dict(sink=sink, dtype=dtype, device=device)
        super().__init__(
            hidden_size,
            Router(hidden_size, num_experts, rule, comm, own_tokens=True, has_bias=has_bias, **options),
            ExpertNetworks(hidden_size, ffn_size, num_experts, experts_comm, spread=True, **options),
            comm,
            comm,
            shared_size=shared_size,
            shared_gated=shared_gated,
            gathers_again=gathers_again,
            **options,
        )
        self.experts_comm, self.row_buffers = experts_comm, row_buffers

    def forward(self, x: Tensor) -> Tensor:
        """x[T/tp, D] -> y[T/tp, D]."""
        (x,) = lowered(x)
        self.check(x)
        if isinstance(self.comm, WholeRows):
            # Every rank has all rows: each sends its share, and all get what comes back.
            own = shard_rows(len(x), self.comm.size, self.comm.rank)
            y = self.comm.over.all_gather_rows(self._by_experts(x[own], -(-len(x) // self.comm.size)), len(x))
        else:
            y = self._by_experts(x, len(x))
        return y if self.shared_expert is None else y + self.shared(x)

    def _by_experts(self, x: Tensor, most_tokens: int) -> Tensor:
        """Return what the experts make of this rank's tokens x[t, D]; no rank has more than most_tokens."""
        comm, routed = self.experts_comm, self.gate(x)
        routes = once(lambda: self._routes_of(routed, most_tokens))
        # Ranks have as many rows as tokens' choices on average: tiles are chosen by that, not by the rows that come.
        usual_rows = routes.weights.numel()
        if not is_recorded():
            ys = self.networks(rows_to_experts(x, routes, comm), routes.offsets, usual_rows)
            return rows_to_sums(ys, routes, comm, weighted=True, keeps=False)[0]
        ys = self.networks(_Dispatched.apply(x, routes, comm), routes.offsets, usual_rows)
        y: Tensor = _SpreadCombined.apply(ys, routed.weights, routes, comm)
        return y

    def _routes_of(self, routed: Routed, most_tokens: int) -> Routes:
        # Detached: what is kept for a second forward must not hold the graph of the first.
        mine = routed.order, routed.places, routed.weights.detach(), routed.counts
        if self.row_buffers is None:
            return exchange_counts(*mine, self.experts_comm)
        return self.row_buffers.exchange_counts(*mine, most_tokens)
