"""The batch of a step: this rank's micro-batches, and the reports of all ranks on theirs, exchanged in one gather.

A rank reads windows if its stage needs their tokens (the model's first chunk) or their labels (its last); the others
read nothing. A thread reads them while the steps before compute (ahead.py). Every rank then reports to all
others whether it read, a digest of its windows, and the number of valid targets. From the reports each rank computes on
its device whether the batch is usable, and reads that at the end of the step, together with the loss. Until then a rank
that cannot read its file computes with zeros. No rank applies the update of a batch that is not usable.
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
from tpkernels.exchange.communicator import Communicator

from tpengine.config import IGNORED_LABEL, Config
from tpengine.distributed.mesh import Mesh
from tpengine.distributed.process import link_device, to_device
from tpengine.layers import vocab_parallel_cross_entropy
from tpengine.layers.dropout import Position
from tpengine.layers.rows import Documents
from tpengine.training.ahead import ReadAhead, StepSamples
from tpengine.training.samples import SamplePosition, SampleReader, first_sample_index

READING = "reading its text"
"""What a rank does while it waits for its samples; it then waits for no other rank."""

# Steps whose samples are read before they are needed: a read may take two steps' time, now and then.
_STEPS_AHEAD = 2
_UNREADABLE, _NOT_READ, _READ = -1, 0, 1
_LEAST, _MOST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


class Report(NamedTuple):
    """A rank's report on the windows it should read.

    Attributes:
        status: _UNREADABLE, _NOT_READ (this rank needs none) or _READ.
        digest: digest of the windows (samples.batch_digest).
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
        scale: what the losses that backward starts from are multiplied by besides (training/loss_scale.py: LossScale).
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
        end_step: nothing is read ahead for this step and later ones; None for no end.

    Attributes:
        needs_samples: whether this rank needs any.
        seconds: how long this rank waited for samples of the current step; 0 if it needs none.

    `close` ends the thread that reads ahead; so does letting the reader go.
    """

    def __init__(
        self,
        config: Config,
        samples: SampleReader,
        mesh: Mesh,
        ends: tuple[int, int],
        device: torch.device,
        position: Callable[[int], SamplePosition] | None = None,
        end_step: int | None = None,
    ) -> None:
        self._train, self._mesh, self._ends, self._device = config.train, mesh, ends, device
        self._position, self._end_step = position or self._after_equal_steps, end_step
        self._reads = mesh.at.pp in ends
        self.needs_samples = self._reads or samples.packs
        self._ahead = ReadAhead(samples, self._reads)
        self._taken: tuple[int, StepSamples] | None = None
        self.seconds = 0.0

    def wait(self, step: int) -> bool:
        """Wait until this rank's samples of a step are there, and have those of the next steps read.

        Args:
            step: 0-based.
        Returns: whether they were there at once.
        """
        was_there, self.seconds, self._taken = True, 0.0, (step, StepSamples())
        if not self.needs_samples:
            return was_there
        begin, numbers = time.perf_counter(), self._numbers(step)
        was_there = self._ahead.is_there(numbers)
        self._taken = step, self._ahead.take(numbers)
        self.seconds = time.perf_counter() - begin
        for coming in range(step + 1 + self._ahead.num_asked, step + 1 + _STEPS_AHEAD):
            if self._end_step is None or coming < self._end_step:
                self._ahead.ask(self._numbers(coming))
        return was_there

    def read(self, step: int) -> StepBatch:
        """Return what this rank needs of a step, and exchange reports; collective over all ranks.

        Args:
            step: 0-based.

        Cost: a gather of 24 bytes per rank. It does not wait for the device.
        """
        train = self._train
        if self._taken is None or self._taken[0] != step:
            self.wait(step)
        assert self._taken is not None
        (_, found), self._taken = self._taken, None
        tokens = labels = torch.empty(0, dtype=torch.int64)
        mine = Report(_UNREADABLE) if found.error else Report()
        if found.tokens is not None and found.labels is not None:
            mine = Report(_READ, found.digest, found.num_valid)
            tokens, labels = (
                torch.from_numpy(array).view(train.num_micro_batches, -1) for array in (found.tokens, found.labels)
            )
        elif self._reads:
            # Go on with zeros and ignored labels.
            tokens = torch.zeros(train.num_micro_batches, train.micro_batch_size * train.seq_len, dtype=torch.int64)
            labels = torch.full_like(tokens, IGNORED_LABEL)
        documents = documents_of(found.starts, train.seq_len, train.micro_batch_size, self._device)
        # Report to all ranks; each computes the same scale and verdict from all reports.
        reports = self._gathered(mine)
        scale, usable = self._judged(reports)
        tokens, labels = to_device(tokens, self._device), to_device(labels, self._device)
        return StepBatch(tokens, labels, scale, usable, reports, found.error, documents)

    def close(self) -> None:
        """End the thread that reads ahead."""
        self._ahead.close()

    def _numbers(self, step: int) -> NDArray[np.int64]:
        """Return the numbers, in the order, of this replica's samples of a step."""
        return self._position(step).samples(self._first_in_step(), self._num_samples)

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
