"""What a run minimises: a loss of your own, the number it is divided by, and metrics; by default next-token loss.

    loss of a step      = sum over micro-batches of loss(output, batch) / sum over micro-batches of count(batch)
    metric of a step    = the same of each metric, divided by that count or by one of its own

A loss is a sum over its micro-batch, never a mean: what it is divided by is of the global step, and known from data
alone before the first forward. `output` is what the model has computed (last_output.py), `batch` what it was given.
Every tp rank of the last stage calls the loss, with all tokens of a micro-batch, and must return the same number.

The decision a reader will question: an exception of a loss does not leave the step at once. Other ranks would wait for
this one. It makes the loss NaN, which updates nothing, and all ranks end the run by its words when the step ends.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tpkernels.exchange.arena import CallMismatch
from tpkernels.symmetric.signals import PeerError

from tpengine.config import IGNORED_LABEL, TrainConfig
from tpengine.distributed.process import to_device
from tpengine.layers.rows import Documents
from tpengine.training.last_output import LastOutput


class ObjectiveError(Exception):
    """A loss, a count or a metric cannot be used, in one line."""


@dataclass(frozen=True)
class MicroBatch:
    """What a loss is given beside the model's output: a micro-batch of T = sequences * seq tokens.

    Attributes:
        tokens: int64 [T], what the model reads.
        labels: int64 [T], the token behind each; -100 where it does not count.
        weights: float32 [T], of each label, where the text has such a column, else None. Zero where a label is ignored.
        columns: the text's other columns, by name, [T] or [T, width], each with its own dtype: row t is that of
            labels[t]. Zero where a label is ignored.
        documents: where they begin, if sequences are packed; None where each sequence is one document.
        seq: tokens of a sequence.
    """

    tokens: Tensor
    labels: Tensor
    weights: Tensor | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    documents: Documents | None = None
    seq: int = 0

    def to(self, device: torch.device) -> MicroBatch:
        """Return it on the device; documents are there."""
        return replace(
            self,
            tokens=to_device(self.tokens, device),
            labels=to_device(self.labels, device),
            weights=None if self.weights is None else to_device(self.weights, device),
            columns={name: to_device(column, device) for name, column in self.columns.items()},
        )


Loss = Callable[[LastOutput, MicroBatch], Tensor]
Count = Callable[[MicroBatch], float]
Metric = Callable[[LastOutput, MicroBatch], "Tensor | float | tuple[Tensor | float, Tensor | float]"]


class ObjectiveValues(NamedTuple):
    """What an objective is for a micro-batch.

    Attributes:
        loss: [], the sum.
        metrics: (sum, count) of each metric, in the objective's order; of one without a count of its own that of the
            micro-batch.
    """

    loss: Tensor
    metrics: tuple[tuple[Tensor | float, Tensor | float], ...] = ()


@dataclass(frozen=True)
class NextToken:
    """The loss of a run without its own: cross-entropy of the next token, by the labels' weights where there are some.

    Attributes:
        label_smoothing, z_loss: as layers.vocab_parallel_cross_entropy.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __call__(self, output: LastOutput, batch: MicroBatch) -> Tensor:
        """Return the sum over valid labels; backward overwrites the logits."""
        return output.cross_entropy(
            batch.labels,
            batch.weights,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            overwrites=True,
        )


@dataclass(frozen=True)
class Objective:
    """A loss, what it is divided by, and metrics.

    Attributes:
        loss: (output, batch) -> Tensor [], the sum over the micro-batch; differentiable, and equal on all tp ranks. By
            default NextToken, with the settings train.label_smoothing and train.z_loss.
        count: batch -> number, at least 0; called on the host, where the batch's tensors are, before the step. In exact
            mode layouts agree bit for bit where counts are whole, or sums of float32 numbers. By default the valid
            labels, or the sum of their weights.
        metrics: by name, (output, batch) -> the sum over the micro-batch, or (sum, count); called without autograd.

    With parallel.recompute full, loss and metrics are computed twice.
    """

    loss: Loss | None = None
    count: Count | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is a user's own, so that nothing need be checked or kept for it."""
        return isinstance(self.loss, NextToken) and self.count is None and not self.metrics

    def evaluate(self, output: LastOutput, batch: MicroBatch, count: float) -> ObjectiveValues:
        """Compute loss and metrics of a micro-batch.

        Args:
            count: what `count_of` has returned for the batch.

        Raises:
            ObjectiveError: one of them raises, or returns what it may not.
        """
        assert self.loss is not None, "resolve the objective first"
        if self.is_plain:
            return ObjectiveValues(self.loss(output, batch))
        loss = _called("the loss", functools.partial(self.loss, output, batch))
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            raise ObjectiveError(
                f"a loss is one number, the sum over its micro-batch: got {_told(loss)}: return its sum"
            )
        if loss.dtype.itemsize < 4:
            raise ObjectiveError(
                f"a loss is summed in at least 32 bits: got {loss.dtype}, which would round every gradient: take "
                ".float() of the values before their sum"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ObjectiveError(
                "a loss must follow from the output by what autograd records: it needs no gradient: make it of "
                "output.token_logprobs, entropy, logits or hidden, without detach()"
            )
        with torch.no_grad():
            found = [_metric(name, metric, output, batch, count) for name, metric in self.metrics.items()]
        return ObjectiveValues(loss, tuple(found))

    def count_of(self, batch: MicroBatch) -> float:
        """Return what a micro-batch adds to what the loss is divided by.

        Raises:
            ObjectiveError: it raises, or is no finite number of at least 0.
        """
        if self.count is None:
            return valid_targets(batch)
        number = _called("the count", functools.partial(self.count, batch))
        try:
            count = float(number)
        except (TypeError, ValueError, RuntimeError):
            raise ObjectiveError(f"a count is one number: got {_told(number)}: return its sum") from None
        if not 0 <= count < float("inf"):
            raise ObjectiveError(
                f"a count is a finite number of at least 0: got {count}: count what the loss is a sum over"
            )
        return count


def valid_targets(batch: MicroBatch) -> float:
    """Return the number of labels that count, or the sum of their weights."""
    valid = batch.labels != IGNORED_LABEL
    return float(valid.sum() if batch.weights is None else batch.weights.double()[valid].sum())


def resolved(objective: Objective | None, train: TrainConfig) -> Objective:
    """Return an objective with its loss: by default next-token loss as the settings have it.

    Raises:
        ValueError: settings of next-token loss beside a loss of the user's own; names of metrics that no row can have.
    """
    objective = objective or Objective()
    if objective.loss is None:
        objective = replace(objective, loss=NextToken(train.label_smoothing, train.z_loss))
    elif objective.loss != NextToken(train.label_smoothing, train.z_loss) and (train.label_smoothing or train.z_loss):
        raise ValueError(
            f"train.label_smoothing {train.label_smoothing:g} and train.z_loss {train.z_loss:g} are of the next-token "
            "loss, which a loss of your own replaces: leave them 0, and pass them to output.cross_entropy"
        )
    for name in objective.metrics:
        if not isinstance(name, str) or not name or "/" in name or not name.isprintable():
            raise ValueError(
                f"a metric needs a name of printable characters without /: got {name!r}: name it otherwise"
            )
    return objective


def _metric(
    name: str, metric: Metric, output: LastOutput, batch: MicroBatch, count: float
) -> tuple[Tensor | float, Tensor | float]:
    found: Any = _called(f"metric {name}", functools.partial(metric, output, batch))
    pair = found if isinstance(found, tuple) else (found, count)
    if len(pair) != 2 or any(not isinstance(part, int | float) and _told(part) != "a number" for part in pair):
        told = ", ".join(map(_told, pair))
        raise ObjectiveError(f"a metric is one number, a sum, or a sum and a count: {name} gave {told}: return its sum")
    of_sum, of_count = (part.detach() if isinstance(part, Tensor) else part for part in pair)
    return of_sum, of_count


def _told(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}" if value.dim() else "a number"
    return f"{type(value).__name__} {str(value)[:60]!r}"


def _called(what: str, call: Callable[[], Any]) -> Any:
    """Call what is the user's; what it raises becomes one line, but not what other ranks have done."""
    try:
        return call()
    except (PeerError, CallMismatch):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        frame = frames[1] if len(frames) > 1 else frames[0]
        words = " ".join(str(error).split())
        raise ObjectiveError(
            f"{what} raised {type(error).__name__}: {words} (line {frame.lineno} of {frame.filename})"
        ) from error
