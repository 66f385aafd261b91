"""What training changes on one rank, and a checkpoint holds: weights, optimizer, gradient buckets, counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from tpkernels.exchange.mailbox import Mailbox
from tpkernels.launch import accumulation_dtype

from tpengine.checkpoint.rollbacks import Rollback
from tpengine.config import spike_rule_of
from tpengine.data_parallel import GradientBuckets
from tpengine.distributed.mesh import Communicators, Mesh
from tpengine.layers.gradient_sink import WeightHalves
from tpengine.layout.parameters import decays
from tpengine.observe.activity import Activity
from tpengine.pipeline.stage import Batch, Stage
from tpengine.plan import Recompute
from tpengine.training.assembly import assemble
from tpengine.training.planned_run import PlannedPhase
from tpengine.training.update.loss_scale import LossScale
from tpengine.training.update.optimizer import AdamW
from tpengine.training.update.spikes import SpikeWindow


@dataclass(frozen=True)
class RankContext:
    """Where a rank computes, and how it reaches the others: made once, for all phases.

    Attributes:
        device: where this rank computes.
        mesh, comms: the ranks by axis, and the communicators between them.
        mailbox: carries the pipeline's messages between CPU ranks of one host; None if the process group does.
        activity: told what this rank does.
    """

    device: torch.device
    mesh: Mesh
    comms: Communicators
    mailbox: Mailbox | None
    activity: Activity


class TrainState:
    """The state of a run on one rank; its weights hold anything until somebody draws or loads them.

    Args:
        rank: this rank.
        part: the phase that the state is in.

    Attributes:
        rank: as given.
        part: the current phase; state.next_phase.enter_phase changes it.
        model: this rank's shards of this rank's chunks.
        halves: contributions to weight gradients, between the halves of a backward pass.
        gradients: what the model's layers add to.
        sliced: the weights where replicas own slices of them (ZeRO), else None.
        optimizer: updates `weights`.
        num_updates: number of updates applied, including those before the checkpoint that the run continues.
        loss_scale: of the next step.
        spikes: loss and norm of the last steps.
        rollbacks: those of the run so far; their samples are left out.
    """

    def __init__(self, rank: RankContext, part: PlannedPhase) -> None:
        self.rank, self.part = rank, part
        self.num_updates = 0
        self.loss_scale = LossScale(part.config.train.dtype)
        self.spikes = SpikeWindow(spike_rule_of(part.config.train.spike))
        self.rollbacks: tuple[Rollback, ...] = ()
        self.build()

    def build(self) -> None:
        """Build the current phase's model, which holds anything, its gradient buckets and its optimizer."""
        config = self.part.config
        self.halves = WeightHalves()
        self.model, self.gradients, self.sliced = assemble(
            config, self.part.layout, self.rank.mesh, self.rank.comms, self.rank.device, self.halves
        )
        self.optimizer = AdamW(
            self.weights,
            self.gradients.of,
            [name for name, piece in self.model.pieces.items() if decays(config.model, piece.spec)],
            config.optim,
        )

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """What this rank's optimizer updates, by piece: whole weights, or with ZeRO its own elements, one dim."""
        return self.model.held if self.sliced is None else self.sliced.of

    @property
    def buckets(self) -> GradientBuckets:
        """The buckets that gradients are summed in over replicas."""
        return self.gradients.buckets

    def stages(self, batch: Batch) -> dict[int, Stage]:
        """Return this rank's chunks at run time, by number.

        Args:
            batch: the micro-batches that they run.
        """
        plan, seq_len = self.part.plan, self.part.config.train.seq_len
        last = len(plan.chunks) - 1
        return {
            chunk: Stage(
                partial(self.model, seq=seq_len, chunk=number),
                batch,
                is_first=chunk == 0,
                is_last=chunk == last,
                recompute=plan.chunks[chunk].recompute is Recompute.FULL,
            )
            for number, chunk in enumerate(plan.chunks_of(self.rank.mesh.at.pp))
        }

    def draw_weights(self) -> None:
        """Draw the initial weights, as train.seed says. On a CPU 1 GB takes a core some 10 s."""
        train = self.part.config.train
        self.model.initialise(train.seed, self._store, accumulation_dtype(getattr(torch, train.dtype)))

    def clear_padding(self) -> None:
        """Make the rows zero that no file and no checkpoint has."""
        for name in self.weights:
            if self.model.pieces[name].spec.valid_rows is not None:
                self.optimizer.set(name, torch.zeros((), device=self.rank.device))

    def restart(self) -> None:
        """Be at step 0, but for the weights."""
        self.num_updates, self.loss_scale = 0, LossScale(self.part.config.train.dtype)
        self.spikes.restore(None)
        self.optimizer.clear()

    def _store(self, name: str, values: Tensor) -> None:
        """Take a piece's initial values: whole, or what this replica owns of them."""
        if self.sliced is None:
            self.optimizer.set(name, values)
        elif name in self.sliced.parts:
            self.optimizer.set(name, values.view(-1)[self.sliced.parts[name].in_tensor])
