"""The batch of a step: this rank's micro-batches, and the reports of all ranks on theirs, exchanged in one gather.

A rank reads windows if its stage needs their tokens (the model's first chunk) or their labels (its last); the others
read nothing. Every rank then reports to all others whether it read, a digest of its windows, and the number of valid
targets. From the reports each rank computes on its device whether the batch is usable, and reads that at the end of the
step, together with the loss. Until then a rank that cannot read its file computes with zeros. No rank applies the
update of a batch that is not usable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from tpengine.config import IGNORED_LABEL, Config
from tpengine.data import Position as SamplePosition
from tpengine.data import SampleReader, batch_digest, first_sample_index
from tpengine.distributed.mesh import Mesh
from tpengine.distributed.process import link_device, to_device
from tpengine.layers import vocab_parallel_cross_entropy
from tpengine.layers.collectives import Communicator
from tpengine.layers.documents import Documents
from tpengine.layers.dropout import Position

_UNREADABLE, _NOT_READ, _READ = -1, 0, 1
_LEAST, _MOST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


class Report(NamedTuple):
    """A rank's report on the windows it should read.

    Attributes:
        status: _UNREADABLE, _NOT_READ (this rank needs none) or _READ.
        digest: digest of the windows (data.batch_digest).
        num_valid: number of valid targets.
    """

    status: int = _NOT_READ
    digest: int = 0
    num_valid: int = 0


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one replica and step, on the device.

    Attributes:
        tokens, labels: int64 [micro-batches, T]; empty on a stage that needs neither.
        loss_scale: float64 [], 1 / number of valid targets of the global step.
        usable: bool [], equal on all ranks: all could read, the ranks of each replica read the same, a target is valid.
        reports: int64 [pp, dp, tp, 3], the reports of all ranks; equal on all ranks.
        error: why this rank could not read; empty if it could.
        documents: those of each micro-batch, on every stage; empty where sequences are whole.
    """

    tokens: Tensor
    labels: Tensor
    loss_scale: Tensor
    usable: Tensor
    reports: Tensor
    error: str = ""
    documents: tuple[Documents, ...] = ()

    def refusal(self, step: int, errors: Sequence[str]) -> str:
        """Return why the batch is not usable, in one line, equal on all ranks; waits for the device.

        Args:
            step: 0-based.
            errors: every rank's `error`, by rank.
        """
        status, digests, num_valid = self.reports.cpu().unbind(-1)
        ranks = torch.arange(status.numel()).view_as(status)
        failed = [rank for rank, error in enumerate(errors) if error]
        if failed:
            alone = f", ranks {failed} alone found this" if (status == _READ).any() else ""
            return f"{errors[failed[0]]} (in step {step + 1}{alone})"
        for replica in range(status.shape[1]):
            reads = status[:, replica] == _READ
            members, found = ranks[:, replica][reads], digests[:, replica][reads]
            others = members[found != found[0]].tolist()
            if others:
                return (
                    f"the ranks of a replica must read the same tokens: in step {step + 1} ranks {others} read others "
                    f"than rank {int(members[0])}: give all nodes the same --data.path, and check their disks"
                )
        assert not num_valid.any() and (status != _UNREADABLE).all(), "a batch is refused, and nothing is wrong with it"
        return (
            f"a step needs at least one valid target: all labels of step {step + 1} are ignored: "
            "change --data.ignore-token"
        )


class TrainingBatch:
    """The micro-batches of the current step, as the stages see them (pipeline.stage.Batch).

    Args:
        config: validated.
        mesh: places of the ranks.
        tp: the ranks that share a row of logits.
        position: set to the micro-batch that comes next, for dropout.
        device: where this rank computes.

    Attributes:
        step: what was read for the current step.
        losses: float64 [dp * micro-batches], the current step's loss sums of all replicas' micro-batches: those of this
            replica have values, the others are zero.
        scale: what the losses that backward starts from are multiplied by besides (training.update.loss_scale).
    """

    step: StepBatch
    scale = 1.0

    def __init__(self, config: Config, mesh: Mesh, tp: Communicator, position: Position, device: torch.device) -> None:
        self._vocab_size, self._tp, self._position = config.model.vocab_size, tp, position
        num_micro_batches = config.train.num_micro_batches
        self._first_number = mesh.at.dp * num_micro_batches
        # One place per micro-batch of all replicas: a sum over ranks only adds zeros to it, exact in any order.
        self.losses = torch.zeros(mesh.shape.dp * num_micro_batches, dtype=torch.float64, device=device)

    def number_of(self, microbatch: int) -> int:
        """Return the number, counted over all replicas, of a micro-batch of this replica."""
        return self._first_number + microbatch

    def begin(self, microbatch: int) -> None:
        """See Batch."""
        self._position.microbatch = self.number_of(microbatch)
        self._position.documents = self.step.documents[microbatch] if self.step.documents else None

    def tokens(self, microbatch: int) -> Tensor:
        """See Batch."""
        return self.step.tokens[microbatch]

    def loss(self, y: Tensor, microbatch: int) -> Tensor:
        """Return the loss of logits y, summed over valid targets, times 1 / all valid targets and the loss scale."""
        loss = vocab_parallel_cross_entropy(y, self.step.labels[microbatch], self._vocab_size, self._tp)
        self.losses[self.number_of(microbatch)] = loss.detach()
        return loss * (self.step.loss_scale * self.scale).to(loss.dtype)


def documents_of(
    starts: Sequence[NDArray[np.int64]], seq_len: int, micro_batch_size: int, device: torch.device
) -> tuple[Documents, ...]:
    """Return the documents of each micro-batch, from where documents begin in each sample after its first token."""
    if not starts:
        return ()
    each = [starts[first : first + micro_batch_size] for first in range(0, len(starts), micro_batch_size)]
    return tuple(
        Documents.of(
            [row * seq_len + start for row, of_row in enumerate(rows) for start in (0, *of_row.tolist())]
            + [len(rows) * seq_len],
            seq_len,
            device,
        )
        for rows in each
    )


class BatchReader:
    """Reads the micro-batches of one rank.

    Args:
        config: validated.
        samples: the samples of the training text.
        mesh: places of the ranks.
        ends: the stages that hold the model's first chunk and its last.
        device: where this rank computes.
        position: step -> where the run is in the samples before it; default after equal steps, nothing left out.

    Attributes:
        seconds: how long this rank read samples of the current step; 0 if it needs none.
    """

    def __init__(
        self,
        config: Config,
        samples: SampleReader,
        mesh: Mesh,
        ends: tuple[int, int],
        device: torch.device,
        position: Callable[[int], SamplePosition] | None = None,
    ) -> None:
        self._train, self._samples, self._mesh, self._ends, self._device = config.train, samples, mesh, ends, device
        self._position = position or self._after_equal_steps
        self.seconds = 0.0

    def read(self, step: int) -> StepBatch:
        """Read what this rank needs of a step, and exchange reports; collective over all ranks.

        Args:
            step: 0-based.

        Cost: a gather of 24 bytes per rank. It does not wait for the device.
        """
        train, at = self._train, self._mesh.at
        tokens = labels = torch.empty(0, dtype=torch.int64)
        mine, error = Report(), ""
        begin = time.perf_counter()
        reads = at.pp in self._ends
        numbers = self._position(step).samples(self._first_in_step(), self._num_samples)
        starts: list[NDArray[np.int64]] = []
        if reads:
            # Read, or go on with zeros and ignored labels.
            tokens = torch.zeros(train.num_micro_batches, train.micro_batch_size * train.seq_len, dtype=torch.int64)
            labels = torch.full_like(tokens, IGNORED_LABEL)
        try:
            if self._samples.packs:
                starts = self._samples.document_starts(numbers)
            if reads:
                arrays = self._samples.read(numbers)
                mine = Report(_READ, batch_digest(*arrays, starts), int((arrays[1] != IGNORED_LABEL).sum()))
                tokens, labels = (torch.from_numpy(array).view_as(tokens) for array in arrays)
        except ValueError as problem:
            mine, error, starts = Report(_UNREADABLE), str(problem), []
        self.seconds = time.perf_counter() - begin if reads else 0.0
        documents = documents_of(starts, train.seq_len, train.micro_batch_size, self._device)
        # Report to all ranks; each computes the same scale and verdict from all reports.
        reports = self._gathered(mine)
        scale, usable = self._judged(reports)
        return StepBatch(
            to_device(tokens, self._device), to_device(labels, self._device), scale, usable, reports, error, documents
        )

    @property
    def _num_samples(self) -> int:
        return self._train.num_micro_batches * self._train.micro_batch_size

    def _first_in_step(self) -> int:
        return first_sample_index(
            0,
            self._mesh.at.dp,
            self._mesh.shape.dp,
            0,
            num_micro_batches=self._train.num_micro_batches,
            micro_batch_size=self._train.micro_batch_size,
        )

    def _after_equal_steps(self, step: int) -> SamplePosition:
        train = self._train
        return SamplePosition(0, step * self._mesh.shape.dp * train.num_micro_batches * train.micro_batch_size)

    def _gathered(self, mine: Report) -> Tensor:
        """Return all ranks' reports [pp, dp, tp, 3] on the device."""
        shape = self._mesh.shape
        report = torch.tensor(mine, dtype=torch.int64)
        everyone = report[None]
        if shape.world_size > 1:
            report = to_device(report, link_device(self._device))
            everyone = torch.empty(shape.world_size, len(mine), dtype=torch.int64, device=report.device)
            dist.all_gather(list(everyone.unbind()), report)
        return to_device(everyone, self._device).view(shape.pp, shape.dp, shape.tp, len(mine))

    def _judged(self, reports: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss scale, and whether the batch is usable."""
        status, digests, num_valid = reports.unbind(-1)
        # The ranks of a replica read the same labels: count those of one rank of its last stage.
        total = num_valid[self._ends[1], :, 0].sum()
        reads = status == _READ
        largest = digests.masked_fill(~reads, _LEAST).amax((0, 2))
        smallest = digests.masked_fill(~reads, _MOST).amin((0, 2))
        usable = (status != _UNREADABLE).all() & (largest == smallest).all() & (total > 0)
        return 1.0 / total.clamp_min(1).double(), usable
