"""Which experts a token goes to: the router of a mixture of experts, and how its choice is kept.

    logits[T, E] = X[T, D] @ w[E, D].T                               in promote_types(dtype, float32)
    experts, weights[T, k], counts[E] = choose(logits)               tpkernels.ops.experts.choose
    order[T k], offsets[E + 1], places[T k] = sort_by_expert(experts)                  order
    dlogits = choose's gradient of dweights;  dX = dlogits @ w;  dw = dlogits.T @ X

Every tp rank has all tokens X and the whole weight, and does the same operations: the ranks choose the same experts
without telling each other. What comes back is a part on each rank: an expert's width is cut, and dweights[T, k] is the
sum over this rank's columns. All behind it is linear, so that dlogits, dw and dX are parts too. dw is summed where the
gradients of norms are (partial(tp)), dX where that of any column-parallel layer is.

A choice is made once. Backward uses what forward has kept, and so does a forward that is computed again
(`--parallel.recompute`, tpkernels.again): logits that differ in a last bit would send a token elsewhere, and its
gradient would belong to other weights than the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.again import once
from tpkernels.derivatives import is_recorded, refuse_second_order
from tpkernels.exchange.communicator import Communicator
from tpkernels.launch import accumulation_dtype
from tpkernels.ops.experts.choose import ChoiceRule, check_choice, choose_backward, choose_forward
from tpkernels.ops.experts.order import sort_forward
from tpkernels.ops.experts.route import router_logits
from tpkernels.ops.matmul.host import product

from tpengine.layers.balance import LayerBalance
from tpengine.layers.gradient_sink import GradientSink, check_reaches
from tpengine.layers.placement import Placement, whole


class Routed(NamedTuple):
    """Where the rows of a micro-batch go.

    Attributes:
        weights: [T, k] in promote_types(dtype, float32).
        experts: int32 [T, k], each token's in the order of its choice.
        counts: int32 [E], tokens of each expert.
        order: int32 [T k]; row r of the sorted rows is choice order[r] % k of token order[r] // k.
        offsets: int32 [E + 1]; rows offsets[e] to offsets[e + 1] are of expert e.
        places: int32 [T k]; the row of each choice.
    """

    weights: Tensor
    experts: Tensor
    counts: Tensor
    order: Tensor
    offsets: Tensor
    places: Tensor


class TokenWeight(nn.Module):
    """A weight that scores every token, whole on every rank, and behind which all is a part of a sum over tp.

        y[T, N] = X[T, D] @ w[N, D].T        in promote_types(dtype, float32), the same on every rank
        dX = dy @ w;  dw = dy.T @ X          of dy partial(tp): parts too; the sink sums dw over tp

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
        """See SaysPlacements: whole, and each rank's gradient is the part that comes of its columns."""
        return {"weight": whole(self.comm)}

    def read(self) -> Tensor:
        """Return the weight for one product. It may be computed: read it once."""
        weight = self.weight
        check_reaches(self.sink, weight, "a router's weight")
        return weight


class TokenScores(TokenWeight):
    """The scores themselves, X[T, D] -> y[T, N]."""

    def forward(self, x: Tensor) -> Tensor:
        """X[T, D] -> y[T, N]."""
        weight = self.read()
        if not is_recorded():
            return router_logits(x, weight)
        y: Tensor = _Scores.apply(x, weight, self)
        return y


class Router(TokenWeight):
    """Chooses k of E experts for every token.

    Args:
        hidden_size, num_experts: D and E.
        rule: how they are chosen, and how many.
        comm: as TokenWeight.
        options: sink, dtype and device, as TokenWeight.
        own_tokens: whether X is this rank's tokens alone, and not those of all tp ranks: then dweights is whole.
        has_bias: whether choices follow scores to which a bias of each expert is added, which begins as 0, in
            promote_types(dtype, float32). Weights do not, so that it has no gradient: counts of tokens move it.

    Attributes:
        balance: what it is told of the auxiliary loss, and tells of its choices, where somebody trains it; or None.

    Raises:
        ValueError: the rule cannot choose among so many experts.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        rule: ChoiceRule,
        comm: Communicator,
        *,
        own_tokens: bool = False,
        has_bias: bool = False,
        **options: Any,
    ) -> None:
        check_choice(num_experts, None, rule)
        super().__init__(hidden_size, num_experts, comm, **options)
        self.rule, self.own_tokens = rule, own_tokens
        self.balance: LayerBalance | None = None
        self.e_score_correction_bias: Parameter | None = None
        if has_bias:
            zeros = torch.zeros(num_experts, dtype=accumulation_dtype(self.weight.dtype), device=self.weight.device)
            self.e_score_correction_bias = Parameter(zeros, requires_grad=False)

    def tp_placements(self) -> Mapping[str, Placement]:
        """See TokenWeight: the bias is whole too."""
        bias = {} if self.e_score_correction_bias is None else {"e_score_correction_bias": whole(self.comm)}
        return {**super().tp_placements(), **bias}

    def forward(self, x: Tensor) -> Routed:
        """Return where the rows of X[T, D] go."""
        weight = self.read()
        if not is_recorded():
            logits = router_logits(x, weight)
            routed = self.chosen(logits)
            self.noted(logits, routed.counts)
            return routed
        return Routed(*_Route.apply(x, weight, self))

    def chosen(self, logits: Tensor) -> Routed:
        """Return where rows go by their logits[T, E]; in what is computed again, where they went the first time."""
        found = once(lambda: self._choose(logits))
        # Aliases: what is kept for a second forward must not hold the graph of the first.
        return Routed(*(of.detach() for of in found))

    def noted(self, logits: Tensor, counts: Tensor) -> Tensor | None:
        """Note a choice where somebody asks for it; return what the auxiliary loss needs in backward, if anything."""
        balance = self.balance
        # In what is computed again it is as noted the first time: nothing is exchanged twice.
        return None if balance is None else once(lambda: balance.note(logits, counts))

    def add_balance_(self, dlogits: Tensor, logits: Tensor, fractions: Tensor) -> None:
        """Add the gradient of the auxiliary loss to dlogits[T, E]: of this rank's tokens, so that it counts once."""
        assert self.balance is not None, "who has noted is still there"
        own = len(logits) // self.comm.size
        rows = slice(None) if self.own_tokens else slice(self.comm.rank * own, (self.comm.rank + 1) * own)
        self.balance.add_gradient_(dlogits, logits, fractions, rows)

    def _choose(self, logits: Tensor) -> Routed:
        experts, weights, counts = choose_forward(logits, self.e_score_correction_bias, self.rule)
        return Routed(weights, experts, counts, *sort_forward(experts, len(self.weight)))


class _Route(torch.autograd.Function):
    """Local shapes: X[T, D], w[E, D], logits[T, E], weights[T, k]; dweights, dlogits, dX and dw are partial(tp).

    forward:  logits = X @ w.T;  the choice, kept;  order
    backward: dlogits of dweights, and of the auxiliary loss;  dX = dlogits @ w, in X's dtype;  dw = dlogits.T @ X, into
              the sink
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, router: Router) -> tuple[Tensor, ...]:
        logits = router_logits(x, weight)
        found = router.chosen(logits)
        ctx.save_for_backward(x, weight, logits, found.experts, found.weights, router.noted(logits, found.counts))
        ctx.parameter, ctx.router = weight, router
        ctx.mark_non_differentiable(*found[1:])
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, dweights: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        refuse_second_order("a router")
        x, weight, logits, experts, weights, fractions = ctx.saved_tensors
        dlogits = choose_backward(dweights, logits, experts, weights, ctx.router.rule)
        if fractions is not None:
            ctx.router.add_balance_(dlogits, logits, fractions)
        return *_score_gradients(ctx, dlogits, x, weight, ctx.router), None


class _Scores(torch.autograd.Function):
    """Local shapes: X[T, D], w[N, D], y[T, N].  y = X @ w.T;  dX = dy @ w;  dw = dy.T @ X, into the sink."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: TokenScores) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.layer = weight, layer
        return router_logits(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("a score of tokens")
        x, weight = ctx.saved_tensors
        return *_score_gradients(ctx, dy, x, weight, ctx.layer), None


def _score_gradients(ctx: Any, dy: Tensor, x: Tensor, weight: Tensor, layer: TokenWeight) -> tuple[Tensor | None, ...]:
    """Return dX in X's dtype, and dw if autograd is to have it, of dy[T, N]."""
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = product(dy, weight.to(dy.dtype)).to(x.dtype)
    if ctx.needs_input_grad[1]:
        dw = layer.sink.add(ctx.parameter, product(dy.T, x.to(dy.dtype)), layer.comm)
    return dx, dw
