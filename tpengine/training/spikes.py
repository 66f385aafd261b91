"""What came of a step, and whether it leaps: loss and gradient norm against median and spread of the steps before.

    limit = median + spreads * max(1.4826 * median |x - median|, least * |median|)

of each of the two numbers, over the finite ones of the last `window` steps of the phase. 1.4826 times the median
distance is the standard deviation where numbers are normal. Median and distance are of ranks, so that a few leaps in
the window move neither. A loss that falls fast, as at a run's begin, has a wide spread.

The two numbers have different tails, hence LEAST. A loss leaps by 10 % or more. Of the norm single batches of sound
text have many times the median: in 1,000 steps of `tiny` the loss came 6.5 spreads above its median at most, the norm
8.7 medians, which clipping takes care of. By default a norm leaps from 20 medians above on.

A step is judged by numbers that every rank has before its update, those of the sum that clipping needs; no exchange is
added. The limits are made on the host, of results that all ranks have read, and the device compares. So all ranks
decide alike, and in exact mode all layouts. A phase begins anew: another batch or text has other numbers.

Where a leap's update is skipped its numbers count for later steps: of a text that has become harder for good half a
window is skipped, no more.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tpengine.config import SpikeRule

_OF_NORMAL = 1.4826


@dataclass(frozen=True)
class StepResult:
    """The results of a step, equal on all ranks.

    Attributes:
        loss: nats per valid target of the global step, with the auxiliary loss of routers.
        grad_norm: of the global gradient, before clipping.
        lr: learning rate used.
        skipped: whether loss or norm is not finite, or leaps: then nothing was updated, and the step does not count as
            an update.
        spiked: whether one of them leaps (SpikeWindow).
        overflowed: whether that was because the loss scale was too large; it has halved since.
        loss_scale: that the step ran with; None where the dtype needs none.
        largest: the largest value over all ranks of each figure that `tell` returns.
        metrics: of the global step, by name; NaN where what a metric is divided by is 0.
        loads: of a model with experts how even they were used, by the names that metrics.jsonl has (expert_loads.py).
        is_second: whether it was computed a second time, as rows of experts had no room the first time.
    """

    loss: float
    grad_norm: float
    lr: float
    skipped: bool = False
    spiked: bool = False
    overflowed: bool = False
    loss_scale: float | None = None
    largest: tuple[float, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    loads: Mapping[str, float] = field(default_factory=dict)
    is_second: bool = False

    @property
    def is_not_finite(self) -> bool:
        """Whether the step was skipped because its loss or norm is not finite, whatever the loss scale."""
        return self.skipped and not self.spiked and not self.overflowed


class Limits(NamedTuple):
    """What loss and norm may be at most; a step with more leaps."""

    loss: float = math.inf
    grad_norm: float = math.inf


# The least spread, as a share of the median.
LEAST = Limits(loss=0.01, grad_norm=2.0)


class Entry(NamedTuple):
    """A step's numbers."""

    step: int
    loss: float
    grad_norm: float


class SpikeWindow:
    """The numbers of the last steps of one run, equal on all ranks.

    Args:
        rule: what train.spike says; None judges nothing, and keeps nothing.
    """

    def __init__(self, rule: SpikeRule | None) -> None:
        self.rule = rule
        self._phase = 0
        self._entries: deque[Entry] = deque()

    def limits(self, step: int, phase: int) -> Limits:
        """Return the limits of a step; infinite where too few steps are known.

        Args: step: 0-based. phase: number of its phase.
        """
        if self.rule is None:
            return Limits()
        if phase != self._phase:
            self._phase = phase
            self._entries.clear()
        while self._entries and self._entries[0].step < step - self.rule.window:
            self._entries.popleft()
        if len(self._entries) < self.rule.window // 2:
            return Limits()
        return Limits(
            _limit([entry.loss for entry in self._entries], self.rule.spreads, LEAST.loss),
            _limit([entry.grad_norm for entry in self._entries], self.rule.spreads, LEAST.grad_norm),
        )

    def add(self, step: int, loss: float, grad_norm: float) -> None:
        """Take a step's numbers; those that are not finite are passed over."""
        if self.rule is not None and math.isfinite(loss) and math.isfinite(grad_norm):
            self._entries.append(Entry(step, loss, grad_norm))

    def first_step(self, step: int) -> int:
        """Return the first step of the window that a step was judged by."""
        return self._entries[0].step if self._entries else step

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        return {"phase": self._phase, "steps": [list(entry) for entry in self._entries]}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go on with what a checkpoint holds; None, that of a run which judged nothing, begins anew."""
        self._phase, self._entries = 0, deque()
        if state is not None and self.rule is not None:
            self._phase = int(state["phase"])
            self._entries.extend(Entry(int(step), float(loss), float(norm)) for step, loss, norm in state["steps"])


def _limit(values: Sequence[float], spreads: float, least: float) -> float:
    middle = statistics.median(values)
    spread = _OF_NORMAL * statistics.median([abs(value - middle) for value in values])
    return middle + spreads * max(spread, least * abs(middle))
