"""What came of a step, as numbers that all ranks have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """The results of a step, equal on all ranks.

    Attributes:
        loss: nats per valid target of the global step.
        grad_norm: of the global gradient, before clipping.
        lr: learning rate used.
        skipped: whether loss or norm is not finite, or leaps: then nothing was updated, and the step does not count as
            an update.
        spiked: whether one of them leaps (training.update.spikes).
        overflowed: whether that was because the loss scale was too large; it has halved since.
        loss_scale: that the step ran with; None where the dtype needs none.
        largest: the largest value over all ranks of each figure that `tell` returns.
    """

    loss: float
    grad_norm: float
    lr: float
    skipped: bool = False
    spiked: bool = False
    overflowed: bool = False
    loss_scale: float | None = None
    largest: tuple[float, ...] = ()

    @property
    def is_not_finite(self) -> bool:
        """Whether the step was skipped because its loss or norm is not finite, whatever the loss scale."""
        return self.skipped and not self.spiked and not self.overflowed
