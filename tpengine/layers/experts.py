"""A mixture of experts whose widths are cut over tp: each expert's network as a feed-forward network's.

    X[T, D] = all_gather_tp(x[T/tp, D])                        one gather for router, experts and shared expert
    experts, weights[T, k], order, offsets = route(X)          routing.py; the same on every rank
    Xs[R, D] = rows of X, sorted by expert, R = T k            tpkernels.ops.experts.rows
    Hs[R, F/tp] = silu(Xs @ w_gate[e].T) * (Xs @ w_up[e].T)    tpkernels.ops.experts.grouped: each expert its rows
    Ys[R, D] = Hs @ w_down[e].T                                a part of the sum over tp
    Y[t] = sum over j of weights[t, j] Ys[row of (t, j)]       k terms in the order of the choice
    y[T/tp, D] = reduce_scatter_tp(Y)

No token is dropped, and none is padded: an expert multiplies the rows that it gets. The exchanges are those of a dense
network, before and behind all experts. So exact mode is this layer over a ShardCommunicator, as any other's.

The decision a reader will question: all tp ranks route all T tokens, D E multiplications beside 3 k D F / tp, instead
of telling each other. What their backward has is a part of each gradient: see routing.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.autocast import lowered
from tpkernels.derivatives import differentiable_once, is_recorded, refuse_second_order
from tpkernels.exchange.communicator import Communicator
from tpkernels.ops.experts.choose import ChoiceRule
from tpkernels.ops.experts.grouped import grouped_matmul_forward
from tpkernels.ops.experts.grouped_swiglu import grouped_swiglu_backward, grouped_swiglu_forward
from tpkernels.ops.experts.rows import combine_backward, combine_forward, take_backward, take_forward

from tpengine.layers.collectives import ShardCommunicator, WholeRows, gather, reduce_scatter
from tpengine.layers.gradient_sink import GradientSink, check_reaches
from tpengine.layers.mlp import FeedForward
from tpengine.layers.placement import Placement, check_divides, cut
from tpengine.layers.routing import Routed, Router, TokenScores
from tpengine.layers.whereabouts import Placed, says_where


class ExpertWeight(nn.Module):
    """One projection of all experts: w[E, out, in], one dim of each expert's matrix cut over tp.

    Args:
        num_experts, out_features, in_features: E and the global sizes of an expert's matrix.
        dim: the dim of w that is cut: 1 for an output-parallel product, 2 for an input-parallel one, 0 where each rank
            has whole experts.
        comm, dtype, device: as ColumnParallelLinear.

    Raises:
        ValueError: the dim is not divisible by the number of shards.
    """

    def __init__(
        self,
        num_experts: int,
        out_features: int,
        in_features: int,
        dim: int,
        comm: Communicator,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        shape = [num_experts, out_features, in_features]
        shape[dim] = check_divides("an expert's width" if dim else "the number of experts", shape[dim], comm.size)
        self.comm, self.dim = comm, dim
        self.weight = Parameter(torch.empty(shape, dtype=dtype, device=device))
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def tp_placements(self) -> Mapping[str, Placement]:
        """See SaysPlacements: each expert's matrix is cut."""
        return {"weight": cut(self.comm, self.dim)}


class ExpertNetworks(nn.Module):
    """The networks of E experts with a gate, each multiplying the rows that are its own.

        Hs[R, F/tp] = silu(Xs @ w_gate[e].T) * (Xs @ w_up[e].T);  Ys[R, D] = Hs @ w_down[e].T, partial(tp)

    Args:
        hidden_size, ffn_size, num_experts: D, F of one expert, and E, global; F divisible by tp.
        comm, sink: as ColumnParallelLinear.
        options: dtype and device of the weights, as torch.
        spread: whether each rank of `comm` has E / N whole experts, instead of 1/N of each one's F.

    Shape: Xs [R, D] sorted by expert, offsets [E + 1]; Ys [R, D].

    Cost: 6*R*D*F/tp flops; keeps Xs and 3*R*F/tp elements for backward.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        comm: Communicator,
        *,
        sink: GradientSink | None = None,
        spread: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.sink: GradientSink = sink or GradientSink()
        rows, columns = (0, 0) if spread else (1, 2)
        # A shard of exact mode has the same bits wherever its rows lie.
        self.fixed = isinstance(comm, ShardCommunicator)
        self.gate_proj = ExpertWeight(num_experts, ffn_size, hidden_size, rows, comm, **options)
        self.up_proj = ExpertWeight(num_experts, ffn_size, hidden_size, rows, comm, **options)
        self.down_proj = ExpertWeight(num_experts, hidden_size, ffn_size, columns, comm, **options)

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gate, up and down. They may be computed: read them once."""
        return self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight

    def forward(self, xs: Tensor, offsets: Tensor, usual_rows: int = 0) -> Tensor:
        """Xs[R, D] -> Ys[R, D].

        Args:
            usual_rows: rows that these experts have as a rule, if R differs from that; see grouped_matmul_forward.
        """
        # They get the gradient, also where autocast multiplies copies.
        weights = self.weights
        xs, *operands = lowered(xs, *weights)
        for weight in weights:
            check_reaches(self.sink, weight, "an expert's weight")
        if is_recorded():
            ys: Tensor = _Experts.apply(xs, offsets, [of.detach() for of in operands], self, usual_rows, *weights)
            return ys
        gate, up, down = operands
        sizes: dict[str, Any] = dict(fixed=self.fixed, usual_rows=usual_rows)
        h, _ = grouped_swiglu_forward(xs, gate, up, offsets, False, **sizes)
        return grouped_matmul_forward(h, down, offsets, **sizes)

    def multiplied(
        self, xs: Tensor, offsets: Tensor, operands: Sequence[Tensor] = (), *, usual_rows: int = 0
    ) -> tuple[Tensor, Multiplied]:
        """Return Ys[R, D], and what `gradients` needs of it, outside autograd.

        Args:
            xs, offsets, usual_rows: as forward.
            operands: what is multiplied by, where these are not the weights themselves.
        """
        gate, up, down = operands or self.weights
        sizes: dict[str, Any] = dict(fixed=self.fixed, usual_rows=usual_rows)
        h, gu = grouped_swiglu_forward(xs, gate, up, offsets, True, **sizes)
        return grouped_matmul_forward(h, down, offsets, **sizes), Multiplied(h, gu)

    def gradients(
        self,
        dys: Tensor,
        xs: Tensor,
        multiplied: Multiplied,
        offsets: Tensor,
        sink: GradientSink,
        trained: Sequence[bool],
        operands: Sequence[Tensor] = (),
        weights: Sequence[Tensor] = (),
        *,
        needs_dx: bool,
        usual_rows: int = 0,
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Return dXs[R, D], or None, and what the sink returns for the three weights, of dYs[R, D].

        Args:
            xs, multiplied, offsets, operands, usual_rows: of `multiplied`.
            sink: where weight gradients go, now or in the weight half.
            trained: which of the weights have one.
            weights: which get them; default these.
        """
        gate, up, down = operands or self.weights
        sizes: dict[str, Any] = dict(fixed=self.fixed, usual_rows=usual_rows)
        dxs = dg = du = None
        if needs_dx or trained[0] or trained[1]:
            dh = grouped_matmul_forward(dys, down, offsets, transposed=True, **sizes)
            dxs, dgu = grouped_swiglu_backward(dh, multiplied.gu, gate, up, offsets, needs_dx=needs_dx, **sizes)
            dg, du = dgu.chunk(2, dim=1)
        # wgrad, now or in the weight half: the sink decides. Frozen projections have none.
        dws: list[Tensor | None] = []
        pairs = ((dg, xs), (du, xs), (dys, multiplied.h))
        for weight, (dy, x), is_trained in zip(weights or self.weights, pairs, trained, strict=True):
            if not is_trained:
                dws.append(None)
                continue
            assert dy is not None, "what is trained has its operands"
            dws.append(sink.grouped_weight_grad(weight, dy, x, offsets, **sizes))
        return dxs, dws


class Multiplied(NamedTuple):
    """What experts' backward needs beside their rows: H[R, F/tp] and GU[R, 2F/tp]."""

    h: Tensor
    gu: Tensor


@says_where
class _Experts(torch.autograd.Function):
    """Local shapes: Xs[R, D]; w_gate, w_up[E, F/tp, D], w_down[E, D, F/tp]; GU[R, 2F/tp], H[R, F/tp]; Ys[R, D].

    forward:  GU = Xs @ (w_gate[e], w_up[e]).T, H = silu(G) * U;  Ys = H @ w_down[e].T, partial(tp)
    dgrad:    dH = dYs @ w_down[e];  dGU of dH;  dXs = dG @ w_gate[e] + dU @ w_up[e]
    wgrad:    dw_down[e] = dYs_e.T @ H_e, dw_gate[e] = dG_e.T @ Xs_e, dw_up[e] = dU_e.T @ Xs_e, into the sink

    H is kept, not made of GU again, as a feed-forward network keeps it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        xs: Tensor,
        offsets: Tensor,
        operands: Sequence[Tensor],
        experts: ExpertNetworks,
        usual_rows: int,
        *weights: Tensor,
    ) -> Tensor:
        ctx.usual_rows = usual_rows
        ys, multiplied = experts.multiplied(xs, offsets, operands, usual_rows=usual_rows)
        # What is multiplied: the weights themselves, so that autograd notices a write, or autocast's copies.
        kept = [w if w.dtype == of.dtype else of for w, of in zip(weights, operands, strict=True)]
        ctx.save_for_backward(xs, offsets, *multiplied, *kept)
        ctx.experts, ctx.weights = experts, weights
        return ys

    @staticmethod
    def backward(ctx: Any, dys: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("a mixture of experts")
        xs, offsets, h, gu, *operands = ctx.saved_tensors
        needs_dx, trained = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        experts, of_weights = ctx.experts, ctx.weights
        dxs, dws = experts.gradients(
            dys.contiguous(),
            xs,
            Multiplied(h, gu),
            offsets,
            experts.sink,
            trained,
            operands,
            of_weights,
            needs_dx=needs_dx,
            usual_rows=ctx.usual_rows,
        )
        return dxs, None, None, None, None, *dws


class _Rows(torch.autograd.Function):
    """Local shapes: X[T, D], Xs[R, D].  Xs = X[order // k];  dX[t] = the sum of dXs' rows of t, in their order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.k = k
        return take_forward(x, order, k)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dxs: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return take_backward(dxs.contiguous(), places, ctx.k), None, None, None


class _WeightedSum(torch.autograd.Function):
    """Local shapes: Ys[R, D], weights[T, k], Y[T, D], all partial(tp) but weights.

    forward:  Y[t] = sum over j of weights[t, j] Ys[place of (t, j)], in the order of j
    backward: dYs[r] = weights of r * dY[its token];  dweights[t, j] = <dY[t], Ys[place of (t, j)]>, partial(tp)
    """

    @staticmethod
    def forward(ctx: Any, ys: Tensor, weights: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(ys, order, places, weights)
        return combine_forward(ys, places, weights)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *combine_backward(dy.contiguous(), *ctx.saved_tensors), None, None


def rows_of(x: Tensor, routed: Routed) -> Tensor:
    """Return Xs[R, D], the rows of X[T, D] sorted by expert, each k times."""
    k = routed.weights.shape[1]
    if not is_recorded():
        return take_forward(x, routed.order, k)
    rows: Tensor = _Rows.apply(x, routed.order, routed.places, k)
    return rows


def combined(ys: Tensor, routed: Routed) -> Tensor:
    """Return Y[T, D], the weighted sum of each token's k rows of Ys[R, D], in the order of its choice."""
    if not is_recorded():
        return combine_forward(ys, routed.places, routed.weights)
    y: Tensor = _WeightedSum.apply(ys, routed.weights, routed.order, routed.places)
    return y


class _WithoutExchange(ShardCommunicator):
    """The communicator of a network beside the experts, whose rows are gathered and whose sum is taken with theirs."""

    @property
    def row_part(self) -> int:
        """The whole."""
        return 0

    @property
    def num_row_parts(self) -> int:
        """One: the whole."""
        return 1


class ExpertMixture(Placed, nn.Module):
    """What both forms of a mixture have: a router, experts, and a network that every token goes through, or none.

    Args:
        hidden_size, shared_size, shared_gated: as MixtureOfExperts.
        gate, experts: the parts; no experts where they lie apart (chunked_experts.py).
        comm: of the score that gates the shared network; `inside` of that network itself.
        gathers_again, options: of the shared network, and of both.
    """

    def __init__(
        self,
        hidden_size: int,
        gate: Router,
        experts: ExpertNetworks | None,
        comm: Communicator,
        inside: Communicator,
        *,
        shared_size: int = 0,
        shared_gated: bool = False,
        gathers_again: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.comm, self.gate, self.experts = comm, gate, experts
        self.shared_expert: FeedForward | None = None
        self.shared_expert_gate: TokenScores | None = None
        if shared_size:
            self.shared_expert = FeedForward(hidden_size, shared_size, inside, gathers_again=gathers_again, **options)
            if shared_gated:
                self.shared_expert_gate = TokenScores(hidden_size, 1, comm, **options)

    @property
    def networks(self) -> ExpertNetworks:
        """The experts that are here."""
        assert self.experts is not None, "who has experts apart joins what they make"
        return self.experts

    def shared(self, x: Tensor) -> Tensor:
        """Return what every token gets, y[T, D], partial(tp) if `inside` sums nothing."""
        assert self.shared_expert is not None
        y: Tensor = self.shared_expert(x)
        if self.shared_expert_gate is None:
            return y
        # Apart in memory, so that torch computes each by itself: a token's bits do not depend on how many there are.
        scores = self.shared_expert_gate(x).repeat(1, 2)[:, :1]
        return (scores.sigmoid() * y).to(y.dtype)

    def check(self, x: Tensor) -> None:
        """Raise ValueError, on all ranks of an arena, unless x[T/tp, D] fits."""
        dtype, hidden = self.gate.weight.dtype, self.gate.weight.shape[1]
        is_lowered = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        if x.dim() != 2 or x.shape[1] != hidden or (x.dtype != dtype and not is_lowered):
            self.comm.refuse(
                x,
                f"experts take x[T, {hidden}] of {dtype}: got {list(x.shape)} of {x.dtype}: flatten all dims but the "
                "last, and convert it",
            )

    def prepare(self, num_tokens: int) -> None:
        """Prepare the shared network's weights: see ColumnParallelLinear.prepare. Experts' are read as they lie.

        How many rows an expert gets is not known before, and a copy of all experts is most of a model.
        """
        if self.shared_expert is not None:
            self.shared_expert.prepare(num_tokens)

    def release(self) -> None:
        """Release all prepared weights: see ColumnParallelLinear.release."""
        if self.shared_expert is not None:
            self.shared_expert.release()


class MixtureOfExperts(ExpertMixture):
    """Send every token to k of E feed-forward networks, and add up what they make of it.

        experts, weights[T, k] = route(X), X = all_gather_tp(x[T/tp, D])
        y[T/tp, D] = reduce_scatter_tp(sum over j of weights[t, j] expert(experts[t, j])(X_t) + shared(X_t))
        shared(X_t) = sigmoid(X_t @ w_s.T) network(X_t), or without the factor, or none

    Args:
        hidden_size, ffn_size, num_experts: D, F of one expert, and E, global; F divisible by tp.
        rule: how many experts a token gets, and how they are chosen.
        comm, sink, dtype, device: as ColumnParallelLinear.
        has_bias: as Router.
        shared_size: width of the network that every token goes through; 0 for none.
        shared_gated: whether its output is multiplied by a score of the token.
        gathers_again: of the shared network, as ColumnParallelLinear.
        apart: whether it has all but the experts' networks: who has them calls `gate` and `joined` (model/exact.py).

    Shape: x [T/tp, D], y [T/tp, D].

    Raises:
        ValueError: a width is not divisible by tp; k is more than E, or groups do not divide E.

    Cost: 6*T*k*F/tp*D flops and 2*T*E*D for the router; (tp-1)/tp*T*D elements received and as many sent; keeps
        T*D for the router, 2*T*k*D and 3*T*k*F/tp for the experts.
    Numerics: router, weights and the sum of a token's k terms in promote_types(dtype, float32). Deterministic; which
        experts a token goes to does not depend on the layout, as far as X does not.
    Source: Shazeer et al., "Outrageously large neural networks", arXiv 1701.06538; without capacity, as in Gale et al.,
        "MegaBlocks", arXiv 2211.15841. Shared experts: Dai et al., "DeepSeekMoE", arXiv 2401.06066.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        num_experts: int,
        rule: ChoiceRule,
        comm: Communicator,
        *,
        has_bias: bool = False,
        shared_size: int = 0,
        shared_gated: bool = False,
        sink: GradientSink | None = None,
        gathers_again: bool = False,
        apart: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        options: dict[str, Any] = dict(sink=sink, dtype=dtype, device=device)
        super().__init__(
            hidden_size,
            Router(hidden_size, num_experts, rule, comm, has_bias=has_bias, **options),
            None if apart else ExpertNetworks(hidden_size, ffn_size, num_experts, comm, **options),
            comm,
            _inside(comm),
            shared_size=shared_size,
            shared_gated=shared_gated,
            gathers_again=gathers_again,
            **options,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x[T/tp, D] -> y[T/tp, D]."""
        (x,) = lowered(x)
        self.check(x)
        # One gather for all.
        x = self._gathered(x)
        # Each token to its experts, and back.
        routed: Routed = self.gate(x)
        ys = self.networks(rows_of(x, routed), routed.offsets)
        # One sum for all.
        return self._summed(self.joined(x, ys, routed))

    def joined(self, x: Tensor, ys: Tensor, routed: Routed) -> Tensor:
        """Return Y[T, D], partial(tp), of all tokens X[T, D] and what their experts made of their rows, Ys[R, D]."""
        y = combined(ys, routed)
        return y if self.shared_expert is None else y + self.shared(x)

    def _gathered(self, x: Tensor) -> Tensor:
        return x if isinstance(self.comm, ShardCommunicator | WholeRows) else gather(x, self.comm)

    def _summed(self, y: Tensor) -> Tensor:
        if isinstance(self.comm, ShardCommunicator):
            return y
        return self.comm.reduce_scatter(y) if isinstance(self.comm, WholeRows) else reduce_scatter(y, self.comm)


def _inside(comm: Communicator) -> Communicator:
    """Return the communicator of what is computed between the layer's gather and its sum."""
    if comm.size == 1 or isinstance(comm, ShardCommunicator):
        return comm
    return _WithoutExchange(comm.rank, comm.size, comm.over if isinstance(comm, WholeRows) else comm)
