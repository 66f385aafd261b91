"""The batch of a step: this rank's micro-batches, and the reports of all ranks on theirs, exchanged in one gather.

A rank reads windows if its stage needs their tokens (the model's first chunk) or their labels (its last); the others
read nothing. A thread reads them while the steps before compute (ahead.py). Every rank reports to all others whether it
read, a digest of its windows, and what they add to the number that the loss is divided by: valid targets, or a user's
own count (objective.py). From the reports each rank computes on its device whether the batch is usable, and reads that
at the end of the step, together with the loss. Until then a rank that cannot read its file computes with zeros. No rank
applies the update of a batch that is not usable.

Ranks meet once a step, at its end: there they also exchange their reports on the next step (`report_ahead`, `hear`). So
the loss of that step is scaled from its first F on, and no rank waits for another before it. A report is exchanged when
its step begins in a run's first step, where a rank's samples are not there yet (a slow disk holds up no step that has
been computed), and where the run goes on elsewhere than it seemed: a rollback, a phase, a step that is left out.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from tpengine.config import IGNORED_LABEL, Config
from tpengine.distributed.mesh import Mesh
from tpengine.distributed.process import link_device, to_device
from tpengine.layers.rows import Documents
from tpengine.training.ahead import ReadAhead, StepSamples
from tpengine.training.objective import MicroBatch, Objective, ObjectiveError, resolved
from tpengine.training.samples import WEIGHTS, SamplePosition, SampleReader, first_sample_index

READING = "reading its text"
"""What a rank does while it waits for its samples; it then waits for no other rank."""

# Steps whose samples are read before they are needed: a read may take two steps' time, now and then.
_STEPS_AHEAD = 2
_UNREADABLE, _NOT_READ, _READ = -1, 0, 1
_LEAST, _MOST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


_Known = TypeVar("_Known")


class Report(NamedTuple):
    """A rank's report on the windows it should read.

    Attributes:
        status: _UNREADABLE, _NOT_READ (this rank needs none) or _READ.
        digest: digest of the windows (samples.batch_digest).
        counted: what the loss of its micro-batches is divided by.
    """

    status: int = _NOT_READ
    digest: int = 0
    counted: float = 0.0

    def packed(self) -> Tensor:
        """Return it as int64 [3]; the count as the bits of a float64."""
        (bits,) = struct.unpack("q", struct.pack("d", self.counted))
        return torch.tensor([self.status, self.digest, bits], dtype=torch.int64)


class _Place(NamedTuple):
    """A step, and where the run is in its samples before it: the same on all ranks."""

    step: int
    position: SamplePosition


@dataclass(frozen=True)
class _Reported:
    """What a rank needs of a step, on the host, and what it reports on it."""

    given: MicroBatches
    report: Report
    error: str
    counts: tuple[float, ...]


@dataclass(frozen=True)
class MicroBatches:
    """Micro-batches of one replica, all on one device.

    Attributes:
        tokens, labels: int64 [micro-batches, T]; empty on a stage that needs neither.
        documents: those of each micro-batch, on every stage; empty where sequences are whole.
        weights: float32 [micro-batches, T], of labels; None where the text has none.
        columns: by name, [micro-batches, T] or [micro-batches, T, width].
        seq: tokens of a sequence.
    """

    tokens: Tensor
    labels: Tensor
    documents: tuple[Documents, ...] = ()
    weights: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    seq: int = 0

    def of(self, number: int) -> MicroBatch:
        """Return a micro-batch as a loss is given it."""
        return MicroBatch(
            self.tokens[number],
            self.labels[number],
            None if self.weights is None else self.weights[number],
            {name: column[number] for name, column in self.columns.items()},
            self.documents[number] if self.documents else None,
            self.seq,
        )

    def to(self, device: torch.device) -> MicroBatches:
        """Return them on the device; documents are there."""
        return replace(
            self,
            tokens=to_device(self.tokens, device),
            labels=to_device(self.labels, device),
            weights=None if self.weights is None else to_device(self.weights, device),
            columns={name: to_device(column, device) for name, column in self.columns.items()},
        )


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one replica and step, on the device.

    Attributes:
        given: the micro-batches.
        loss_scale: float64 [], 1 / count of the global step, by default the number of its valid targets.
        usable: bool [], equal on all ranks: all could read, the ranks of each replica read the same and count alike,
            the count is above 0.
        reports: int64 [pp, dp, tp, 3], the reports of all ranks (Report.packed); equal on all ranks.
        error: why this rank could not read; empty if it could.
        counts: of each micro-batch, 0 on a rank that reads none; empty where nothing but their sum is asked for
            (Objective.is_plain), on all ranks alike.
    """

    given: MicroBatches
    loss_scale: Tensor
    usable: Tensor
    reports: Tensor
    error: str = ""
    counts: tuple[float, ...] = ()

    def refusal(self, step: int, errors: Sequence[str]) -> str:
        """Return why the batch is not usable, in one line, equal on all ranks; waits for the device.

        Args:
            step: 0-based.
            errors: every rank's `error`, by rank.
        """
        status, digests, counts = _unpacked(self.reports.cpu())
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
            of_members = counts[:, replica][reads]
            others = members[of_members != of_members[0]].tolist()
            if others:
                return (
                    f"the ranks of a replica must count alike: in step {step + 1} rank {int(members[0])} counts "
                    f"{float(of_members[0]):g}, ranks {others} do not: let the loss's count follow from its batch alone"
                )
        assert not counts.any() and (status != _UNREADABLE).all(), "a batch is refused, and nothing is wrong with it"
        if self.counts:
            return f"a step's count must be above 0: that of step {step + 1} is 0: change the data, or what is counted"
        return (
            f"a step needs at least one valid target: all labels of step {step + 1} are ignored, or their weights are "
            "0: change --data.ignore-token, or the text's weights"
        )


def _unpacked(reports: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return status, digests and counts of reports [..., 3]."""
    status, digests, bits = reports.unbind(-1)
    return status, digests, bits.view(torch.float64)


def micro_batches_of(samples: StepSamples, seq_len: int, micro_batch_size: int, device: torch.device) -> MicroBatches:
    """Return samples as micro-batches on the host, with the documents of each on the device."""
    assert samples.tokens is not None and samples.labels is not None, "samples that were not read are no batch"

    def cut(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).view(-1, micro_batch_size * seq_len, *values.shape[2:])

    return MicroBatches(
        cut(samples.tokens),
        cut(samples.labels),
        documents_of(samples.starts, seq_len, micro_batch_size, device),
        None if samples.weights is None else cut(samples.weights),
        {name: cut(column) for name, column in samples.columns.items()},
        seq_len,
    )


def _zeros(column: Any, tokens: Tensor) -> Tensor:
    """Return zeros instead of the values of a column, for tokens [micro-batches, T]."""
    width = () if column.width == 1 else (column.width,)
    return torch.from_numpy(np.zeros((*tokens.shape, *width), dtype=column.dtype))


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
        objective: counts what a loss is divided by; default as a run without its own.

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
        objective: Objective | None = None,
    ) -> None:
        self._objective = resolved(objective, config.train)
        self._train, self._mesh, self._ends, self._device = config.train, mesh, ends, device
        self._position, self._end_step = position or self._after_equal_steps, end_step
        self._reads = mesh.at.pp in ends
        self.needs_samples = self._reads or samples.packs
        self._ahead, self._columns = ReadAhead(samples, self._reads), samples.columns
        self._taken: tuple[int, StepSamples] | None = None
        # The next step, as it seems: what this rank has reported of it, and what all have.
        self._prepared: tuple[_Place, _Reported] | None = None
        self._heard: tuple[_Place, Tensor] | None = None
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
        # What all have heard of already need not be read again, if it is not there any more.
        if was_there or self._known(self._prepared, step) is None or self._known(self._heard, step) is None:
            self._taken = step, self._ahead.take(numbers)
        self.seconds = time.perf_counter() - begin
        for coming in range(step + 1 + self._ahead.num_asked, step + 1 + _STEPS_AHEAD):
            if self._end_step is None or coming < self._end_step:
                self._ahead.ask(self._numbers(coming))
        return was_there

    def read(self, step: int) -> StepBatch:
        """Return what this rank needs of a step, and exchange reports if that was not done; collective over all ranks.

        Args:
            step: 0-based.

        Cost: nothing on the links after `hear`, else a gather of 24 bytes per rank. It does not wait for the device.
        """
        if self._taken is None or self._taken[0] != step:
            self.wait(step)
        assert self._taken is not None
        (_, found), self._taken = self._taken, None
        # All ranks have heard of the same place, or none has.
        reports, mine = self._known(self._heard, step), self._known(self._prepared, step)
        if reports is None or mine is None:
            mine = self._prepare(found)
            reports = self._gathered(mine.report)
        scale, usable = self._judged(reports)
        return StepBatch(mine.given.to(self._device), scale, usable, reports, mine.error, mine.counts)

    def report_ahead(self, step: int) -> Tensor | None:
        """Return this rank's report on the step that follows, int64 [3] (Report.packed), to be given to all ranks.

        Returns:
            None if its samples are not there yet, or if there is no such step in this phase.
        """
        self._prepared = self._heard = None
        if self._end_step is not None and step >= self._end_step:
            return None
        found: StepSamples | None = StepSamples()
        if self.needs_samples:
            found = self._ahead.peek(self._numbers(step))
        if found is None:
            return None
        mine = self._prepare(found)
        self._prepared = _Place(step, self._position(step)), mine
        return mine.report.packed()

    def hear(self, reports: Tensor) -> None:
        """Keep the reports of all ranks on the step of `report_ahead`, which had one on every rank.

        Args: reports: int64 [ranks, 3], on the device.
        """
        assert self._prepared is not None, "all ranks have reported"
        shape = self._mesh.shape
        self._heard = self._prepared[0], reports.view(shape.pp, shape.dp, shape.tp, reports.shape[-1])

    def _known(self, what: tuple[_Place, _Known] | None, step: int) -> _Known | None:
        """Return what is known of a step, if it still begins where it seemed to."""
        return what[1] if what is not None and what[0] == _Place(step, self._position(step)) else None

    def _prepare(self, found: StepSamples) -> _Reported:
        """Make micro-batches of samples, and count what the loss is divided by."""
        train = self._train
        size, seq_len, error = train.micro_batch_size, train.seq_len, found.error
        counts = () if self._objective.is_plain else (0.0,) * train.num_micro_batches
        mine = Report(_UNREADABLE) if error else Report()
        if found.tokens is not None:
            mine = Report(_READ, found.digest, found.count)
            given = micro_batches_of(found, seq_len, size, self._device)
        else:
            # A rank that cannot read goes on with zeros and ignored labels; one that needs none has none.
            tokens = torch.zeros(train.num_micro_batches if self._reads else 0, size * seq_len, dtype=torch.int64)
            documents = documents_of(found.starts, seq_len, size, self._device)
            columns = {column.name: _zeros(column, tokens) for column in self._columns}
            weights = columns.pop(WEIGHTS, None)
            ignored = torch.full_like(tokens, IGNORED_LABEL)
            given = MicroBatches(
                tokens, ignored, documents, None if weights is None else weights.float(), columns, seq=seq_len
            )
        # What the loss is divided by, if it is the user's to say.
        if mine.status == _READ and not self._objective.is_plain:
            try:
                counts = tuple(self._objective.count_of(given.of(number)) for number in range(train.num_micro_batches))
                mine = mine._replace(counted=math.fsum(counts))
            except ObjectiveError as problem:
                error, mine = str(problem), Report(_UNREADABLE)
        return _Reported(given, mine, error, counts)

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
        report = mine.packed()
        everyone = report[None]
        if shape.world_size > 1:
            report = to_device(report, link_device(self._device))
            everyone = torch.empty(shape.world_size, len(mine), dtype=torch.int64, device=report.device)
            dist.all_gather(list(everyone.unbind()), report)
        return to_device(everyone, self._device).view(shape.pp, shape.dp, shape.tp, len(mine))

    def _judged(self, reports: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss scale, and whether the batch is usable."""
        status, digests, counts = _unpacked(reports)
        # The ranks of a replica read the same labels: count those of one rank of its last stage.
        total = counts[self._ends[1], :, 0].sum()
        usable = (status != _UNREADABLE).all() & _alike(digests, status == _READ) & (total > 0)
        if self._objective.count is not None:
            usable = usable & _alike(counts.view(torch.int64), status == _READ)
        return 1.0 / torch.where(total > 0, total, 1.0), usable


def _alike(numbers: Tensor, reads: Tensor) -> Tensor:
    """Return whether the ranks of each replica that read have the same number; both int64 and bool [pp, dp, tp]."""
    largest = numbers.masked_fill(~reads, _LEAST).amax((0, 2))
    smallest = numbers.masked_fill(~reads, _MOST).amin((0, 2))
    return (largest == smallest).all()
