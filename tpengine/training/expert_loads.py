"""How even the experts of a step are used: tables that routers fill, their sum over ranks, biases that follow from it.

    counts[layer, e]     tokens that chose expert e, of all micro-batches of all replicas: int64, summed exactly
    loss += rate * mean over layers and micro-batches of layers.balance's loss              --train.balance loss
    bias[e] += rate * sign(sum of counts / E - counts[e])                                   --train.balance bias

The tables are one more bucket of the plan (plan.CountBucket): an action of its own sums those of a stage's ranks, once
all forwards of the rank have run and before CLIP, which the plan's verifier checks. CLIP itself only tells the other
stages. So biases move in STEP, when every count is in, once a step, and not in a step that is skipped. Counts are
integers, and each micro-batch's loss has a place of its own to which others add zero bits: no sum depends on the
layout.

The loss is the step's, as that of the targets: it is in what is printed, judged and written; the held-out loss, which
compares models, has none of it. A bias is a weight as others are, in checkpoints too, but no gradient reaches it.

Of each layer with experts a row of metrics.jsonl has, of all tokens of the step,

    expert_load/LAYER         tokens of its hottest expert over those of the mean one: 1 is even, E/k the most
    expert_tokens/LAYER       tokens of its hottest expert
    expert_rank_load/LAYER    rows of the experts of its hottest rank over those of the mean one, of the N = ep ranks
    expert_crossing/LAYER     share of the rows whose expert is another rank's than their token; 0 with ep 1

and with the auxiliary loss `balance_loss`, its mean before the rate: k where all is even.

Where kernels bring rows into buffers that may have no room for all (layers/row_buffers.py), the rows that do not fit
are one more number of these sums, in metrics.jsonl `expert_rows_over`. If there are any, the device skips the update,
and the step is computed again with rows at their exact number (train_step.py). So are the steps that follow, until the
rows of one would have fit: routing changes slowly, and a step computed twice costs more than the waits of one.

Source of the bias: Wang et al., "Auxiliary-loss-free load balancing strategy for mixture-of-experts", arXiv 2408.15664.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.pending import Work

from tpengine.layers.balance import Balance
from tpengine.layers.routing import Router
from tpengine.layers.row_buffers import RowBuffers
from tpengine.layout.groups import moved_of
from tpengine.layout.parameters import layers_of_experts
from tpengine.training.train_state import TrainState

_TOKENS = "expert_tokens"
ROWS_OVER = "expert_rows_over"
# Of each layer, in the order of `figures`.
_NAMES = ("expert_load", _TOKENS, "expert_rank_load", "expert_crossing")


class ExpertLoads:
    """What the routers of a step have chosen, on this rank and then on all.

    Args:
        tables: handed to this rank's routers.
        replicas, stages: the ranks whose tables are parts of one.
        biases: those that move, by the place of their layer.
        rate: of the loss or of the biases.
        index: of the plan's bucket that sums the tables of this stage; None if they are whole.
        buffers: for the rows of this rank's experts; None if rows travel at their exact number.
        num_owners, owner: how many ranks share the experts, N, and which of them this is: it has experts owner E/N to
            (owner + 1) E/N - 1.
        num_alike: how many of them, one beside the other, route the same tokens: in exact mode those of tp. Each then
            sends its part of what an owner gets.

    Attributes:
        tables: as given.
        index: as given.
        counts: int64 [layers, E], of all ranks, once CLIP has them.
        crossing: int64 [layers], rows whose expert is another rank's, the same.
        losses: float64 [layers, micro-batches of all replicas], the same.
        rows_over: int64 [], the same: rows that buffers have no room for.
        buffers: as given.
        uses_buffers: whether the next step brings rows into buffers.
    """

    def __init__(
        self,
        tables: Balance,
        replicas: Communicator,
        stages: Communicator,
        biases: dict[int, Parameter],
        rate: float,
        index: int | None,
        buffers: RowBuffers | None = None,
        num_owners: int = 1,
        owner: int = 0,
        num_alike: int = 1,
    ) -> None:
        self.tables, self._biases, self._rate, self.index = tables, biases, rate, index
        self._replicas, self._stages = replicas, stages
        self._numbers: Tensor | None = None
        self._pending: Work | None = None
        self._num_owners, self._num_alike = num_owners, num_alike
        self._first_alike = owner // num_alike * num_alike
        self.counts = tables.counts.sum(1, dtype=torch.int64)
        self.crossing = self.counts.sum(1)
        self.losses = tables.losses.clone()
        self.rows_over = self.counts.new_zeros(())
        self.buffers, self.uses_buffers = buffers, buffers is not None

    @classmethod
    def of(cls, state: TrainState) -> ExpertLoads | None:
        """Hand tables to the routers of a state's model; None if it has no experts."""
        config, mesh, model, comms = state.part.config, state.rank.mesh, state.model, state.rank.comms
        train, layers = config.train, layers_of_experts(config.model)
        if not layers:
            return None
        num_own = train.num_micro_batches
        tables = Balance(
            layers,
            config.model.details.num_experts,
            config.model.details.router_scores,
            model.position,
            micro_batches=range(mesh.at.dp * num_own, (mesh.at.dp + 1) * num_own),
            num_micro_batches=mesh.shape.dp * num_own,
            has_loss=train.balance == "loss",
            # Where ranks share experts each tp rank routes its own tokens, else, and in exact mode, its replica's.
            parts=None if comms.ep is None or comms.tp.size == 1 or model.parts.is_exact else comms.tp,
            device=state.rank.device,
        )
        moved, biases = moved_of(config), {}
        for number, block in model.layers.items():
            for router in block.modules():
                if isinstance(router, Router):
                    router.balance = tables.of(int(number))
        for name, weight in model.held.items():
            if model.pieces[name].spec.name in moved:
                biases[layers.index(int(name.split(".")[1]))] = weight
        num_alike = comms.tp.size if model.parts.is_exact else 1
        owners = (1, 0) if comms.ep is None else (comms.ep.size, comms.ep.rank, num_alike)
        counts = state.part.plan.counts_of(mesh.at.pp)
        index = None if counts is None else counts.index
        buffers = model.parts.row_buffers
        return cls(tables, comms.dp, comms.pp, biases, train.balance_rate, index, buffers, *owners)

    def begin(self, scale: float) -> None:
        """Forget the step before.

        Args:
            scale: what the losses that backward starts from are multiplied by (TrainingBatch.scale).
        """
        assert self._pending is None, "the counts of the last step were not waited for"
        self.tables.clear()
        self._numbers = None
        self.tables.scale = self._rate * scale / self.losses.numel() if self.tables.has_loss else 0.0
        if self.buffers is not None:
            self.buffers.clear()
            self.buffers.are_used = self.uses_buffers

    def end(self) -> None:
        """What follows a step (held-out loss, samples) has rows at their exact number: nobody would look for more."""
        if self.buffers is not None:
            self.buffers.are_used = False

    def start_sum(self) -> None:
        """Begin to sum the tables of a stage's ranks: tp ranks that route their own tokens, then replicas."""
        assert self._pending is None, "a step's counts are summed once"
        self._numbers = self._of_this_rank()
        self._pending = self._replicas.start_all_reduce(self._numbers)

    def wait(self, index: int) -> Work:
        """Wait until that sum is there; return it, for who asks when it ended."""
        assert index == self.index and self._pending is not None, f"the sum of counts {index} was not begun"
        work, self._pending = self._pending, None
        work.wait()
        return work

    def is_complete(self, index: int) -> bool:
        """Whether `wait` would return at once."""
        assert index == self.index and self._pending is not None, f"the sum of counts {index} was not begun"
        return self._pending.is_complete()

    def _of_this_rank(self) -> Tensor:
        """Return counts, crossing rows, rows over and the bits of losses as one int64 tensor; summed over parts."""
        own, losses, parts = self.tables.counts.sum(1, dtype=torch.int64), self.tables.losses, self.tables.parts
        # Of the rows of this rank's tokens, those that go to others. [layers, E + 1]
        of_layers = torch.cat([own, (own.sum(1) - self._kept())[:, None]], 1)
        over = of_layers.new_zeros(()) if self.buffers is None else self.buffers.spilled
        counts = torch.cat([of_layers.view(-1), over.view(1)])
        if parts is not None:
            parts.all_reduce_(counts)
            # Without an auxiliary loss no rank knows yet of scores of others that are no numbers.
            losses = losses if self.tables.has_loss else parts.all_reduce_(losses.clone())
        # Bits of losses: all ranks but one add zeros to them.
        return torch.cat([counts, losses.view(torch.int64).view(-1)])

    def _kept(self) -> Tensor:
        """Return how many rows of these tokens each layer's owners have already, int64 [layers].

        Of ranks that route the same tokens each has an equal part of the rows that it sends an owner, itself too, as
        exchange.arena.shard_rows cuts them in every micro-batch.
        """
        sizes = *self.tables.counts.shape[:2], self._num_owners, -1
        by_owner = self.tables.counts.view(sizes).sum(3, dtype=torch.int64)
        of_alike = by_owner[:, :, self._first_alike : self._first_alike + self._num_alike]
        part = -(-of_alike // self._num_alike)
        begins = part * torch.arange(self._num_alike, device=part.device)
        return (of_alike - begins).clamp_min(0).minimum(part).sum((1, 2))

    def sum_over_stages(self) -> Tensor:
        """Tell all stages what the ranks of each have counted; collective over the pipeline.

        Returns: float64 [], what the auxiliary loss adds to the loss of the step; 0 without.
        """
        assert self._pending is None, "what a stage has counted is there before other stages are told"
        numbers = self._of_this_rank() if self._numbers is None else self._numbers
        self._stages.all_reduce_(numbers)
        num_layers, num_experts = self.counts.shape
        counts, over, losses = numbers.split([num_layers * (num_experts + 1), 1, self.losses.numel()])
        counts, self.rows_over = counts.view(num_layers, num_experts + 1), over[0]
        self.counts, self.crossing = counts[:, :-1], counts[:, -1]
        self.losses = losses.view(torch.float64).view_as(self.losses)
        return self._rate * self.losses.mean() if self.tables.has_loss else self.losses.new_zeros(())

    @property
    def is_incomplete(self) -> Tensor:
        """Whether rows of the current step were lost, float64 []: 1 or 0, once `sum_over_stages` has them."""
        return (self.rows_over * self.uses_buffers > 0).double()

    @torch.no_grad()
    def move_biases(self, skip: Tensor) -> None:
        """Move the biases of this rank's layers by the counts of all ranks.

        Args:
            skip: float64 []: not zero if the step is skipped. The host does not wait to know it.
        """
        for place, bias in self._biases.items():
            counts = self.counts[place]
            signs = (counts.sum() - counts * len(counts)).sign().masked_fill(skip != 0, 0)
            bias.add_(signs.to(bias.dtype), alpha=self._rate)

    def figures(self) -> Tensor:
        """Return what `named` reads, float64 [2 + 4 layers]; equal on all ranks."""
        hottest, mean, total = self.counts.amax(1).double(), self.counts.double().mean(1), self.counts.sum(1).double()
        by_rank = self.counts.view(len(self.counts), self._num_owners, -1).sum(2)
        rank_load = by_rank.amax(1) * self._num_owners / total
        ends = self.rows_over.double()[None], self.losses.mean()[None]
        return torch.cat([*ends, hottest / mean, hottest, rank_load, self.crossing / total])

    def named(self, figures: Sequence[float]) -> dict[str, float]:
        """Return the figures by their names in metrics.jsonl."""
        layers, (over, mean_loss, *of_layers) = self.tables.layers, figures
        named = {"balance_loss": mean_loss} if self.tables.has_loss else {}
        if self.buffers is not None:
            named[ROWS_OVER] = int(over)
        fields = [(name, layer) for name in _NAMES for layer in layers]
        for (name, layer), value in zip(fields, of_layers, strict=True):
            named[f"{name}/{layer}"] = int(value) if name == _TOKENS else value
        return named

    def must_compute_again(self, named: Mapping[str, float]) -> bool:
        """Return whether rows of the step that has been run were lost, equal on all ranks; decide on the next step's.

        Args:
            named: of that step.
        """
        fits = not named.get(ROWS_OVER)
        must, self.uses_buffers = self.uses_buffers and not fits, self.buffers is not None and fits
        return must

    def first_without_number(self) -> tuple[int, int] | None:
        """Return (micro-batch, layer) of the first scores of the step that are no numbers; None if all are."""
        places = (~self.losses.isfinite()).nonzero().tolist()
        return min(((microbatch, self.tables.layers[place]) for place, microbatch in places), default=None)
