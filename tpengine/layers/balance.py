"""What routers are told and tell while a model of experts is trained: tokens of each expert, and the auxiliary loss.

    counts[e]    tokens of a micro-batch that chose expert e; they sum to k T
    f[e] = counts[e] / T                                  the share of tokens that an expert has; sums to k
    p[t, e]      softmax of the scores, or of sigmoid scores s:  s[t, e] / sum over e of s[t, e]
    P[e] = mean over t of p[t, e]
    loss = E * sum over e of f[e] P[e]                    of one layer and micro-batch; k where all is even
    dlogits[t, e] = scale * E / T * p[t, e] (f[e] - sum over j of f[j] p[t, j]),    of sigmoid scores times 1 - s[t, e]

The loss of a step is rate times the mean over layers and over the micro-batches of all replicas; choices are constants
to it, so f has no gradient. It follows from each micro-batch alone, hence from no layout. Hugging Face's
`load_balancing_loss_func` takes f and P of all layers together before it multiplies: with one layer it is the same, of
several it is smaller, as an expert of one layer makes up for another layer's. Tokens whose target is ignored count too.

Whoever trains hands each router a LayerBalance (its attribute `balance`); without one it computes and keeps nothing
here. A micro-batch has a place of its own in the tables: one that is computed again (recompute, another shard of exact
mode on the same rank) is not counted twice.

Source: Shazeer et al., arXiv 1701.06538, and Fedus et al., "Switch transformers", arXiv 2101.03961, section 2.2; of
sigmoid scores DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from tpkernels.exchange.communicator import Communicator

from tpengine.layers.dropout import Position

Scoring = Literal["softmax", "sigmoid"]


def shares_of_scores(logits: Tensor, scoring: Scoring) -> Tensor:
    """Return p[T, E] of logits[T, E]: each token's scores, which sum to 1."""
    if scoring == "softmax":
        return logits.softmax(1)
    scores = logits.sigmoid()
    return scores / scores.sum(1, keepdim=True)


class Balance:
    """The tables that the routers of one rank fill, and what they are told.

    Args:
        layers: numbers of the layers with experts, of the whole model.
        num_experts: E.
        scoring: of the router.
        position: what is computed next. Only training micro-batches are noted.
        micro_batches: numbers of this rank's micro-batches, among those of all replicas.
        num_micro_batches: of all replicas.
        has_loss: whether there is an auxiliary loss.
        parts: the ranks that each route some of a micro-batch's tokens; None where a rank routes all of them.
        device: of the tables.

    Attributes:
        counts: int32 [layers, micro-batches of this rank, E]; of layers of other stages, zeros. Of the tokens that this
            rank routes.
        losses: float64 [layers, micro-batches of all replicas]: the loss of each, the same on all ranks of `parts`;
            others' are zero. Not finite where scores are not; without an auxiliary loss otherwise zero.
        scale: what the gradient of each `losses` is multiplied by: of the current step.
    """

    def __init__(
        self,
        layers: Sequence[int],
        num_experts: int,
        scoring: Scoring,
        position: Position,
        *,
        micro_batches: range,
        num_micro_batches: int,
        has_loss: bool = False,
        parts: Communicator | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.layers, self.scoring, self.position, self.has_loss = tuple(layers), scoring, position, has_loss
        self.micro_batches, self.parts, self.scale = micro_batches, parts, 0.0
        size = len(self.layers), len(micro_batches), num_experts
        self.counts = torch.zeros(size, dtype=torch.int32, device=device)
        self.losses = torch.zeros(len(self.layers), num_micro_batches, dtype=torch.float64, device=device)

    def of(self, layer: int) -> LayerBalance:
        """Return what the layer of this number in the model is handed."""
        return LayerBalance(self, self.layers.index(layer))

    def clear(self) -> None:
        """Forget the step before."""
        self.counts.zero_()
        self.losses.zero_()


class LayerBalance:
    """What one layer's router is told, and tells.

    Args:
        tables: of all layers.
        place: of this layer among those with experts.
    """

    def __init__(self, tables: Balance, place: int) -> None:
        self._tables, self._place = tables, place

    @torch.no_grad()
    def note(self, logits: Tensor, counts: Tensor) -> Tensor | None:
        """Note what a router has chosen, in forward.

        Args:
            logits: [T, E], in at least float32, of the tokens that this rank routes.
            counts: int32 [E], of the same tokens.

        Returns: f[E], in the dtype of logits, which backward gives to `add_gradient_`; None where that has nothing to
            add: no auxiliary loss, or no training.

        Cost: a pass over logits; with an auxiliary loss, and tokens of several ranks, a sum over them.
        """
        tables, at = self._tables, self._tables.position
        if not at.training:
            return None
        tables.counts[self._place, at.microbatch - tables.micro_batches.start] = counts
        if not tables.has_loss:
            # Not a number where a score is none: 0 else.
            tables.losses[self._place, at.microbatch] = 0 * logits.sum(dtype=torch.float64)
            return None
        num_experts, num_parts = len(counts), 1 if tables.parts is None else tables.parts.size
        # [2, E]: f and P, each divided by all tokens.
        means = torch.stack((counts.double(), shares_of_scores(logits, tables.scoring).sum(0, dtype=torch.float64))) / (
            len(logits) * num_parts
        )
        if tables.parts is not None:
            means = tables.parts.all_reduce_(means)
        tables.losses[self._place, at.microbatch] = num_experts * means.prod(0).sum()
        return means[0].to(logits.dtype)

    @torch.no_grad()
    def add_gradient_(self, dlogits: Tensor, logits: Tensor, fractions: Tensor, rows: slice) -> None:
        """Add the gradient of the auxiliary loss, in backward.

            dlogits[rows, e] += scale * E / T * p (f[e] - sum over j of f[j] p[t, j])

        Args:
            dlogits: [T, E], as logits; in place.
            logits: [T, E], those of `note`.
            fractions: f[E], what `note` has returned.
            rows: which tokens. Where every tp rank (or shard of exact mode) routes all tokens, and their dlogits are
                summed, those that are its own: so each counts once. Where a rank routes its own tokens, all.
        """
        tables, own = self._tables, logits[rows]
        num_parts = 1 if tables.parts is None else tables.parts.size
        shares = shares_of_scores(own, tables.scoring)
        slopes = shares * (fractions - (shares * fractions).sum(1, keepdim=True))
        if tables.scoring == "sigmoid":
            slopes *= 1 - own.sigmoid()
        dlogits[rows] += slopes * (tables.scale * len(fractions) / (len(logits) * num_parts))
