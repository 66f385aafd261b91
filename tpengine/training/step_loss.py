"""The loss and the metrics of a step: micro-batches as the stages see them, and the sums of what comes of them.

Every micro-batch of all replicas has a place in one table, which is summed over replicas once: others only add zeros to
it, exact in any order. Of the tp ranks, which have the same numbers, one rank's count.
"""

from __future__ import annotations

import torch
from torch import Tensor
from tpkernels.exchange.communicator import Communicator

from tpengine.config import Config
from tpengine.distributed.mesh import Mesh
from tpengine.model.transformer import Transformer
from tpengine.training.last_output import LastOutput
from tpengine.training.objective import Objective, ObjectiveError
from tpengine.training.step_batch import StepBatch

# tp ranks compute the same numbers in the same order; a user's own sums may be taken in another on a GPU.
_MOST_APART = 1e-5


class TrainingBatch:
    """The micro-batches of the current step, as the stages see them (pipeline.stage.Batch).

    Args:
        config: validated.
        mesh: places of the ranks.
        tp: the ranks that share a row of logits.
        model: its position is set to the micro-batch that comes next, for dropout.
        device: where this rank computes.
        objective: resolved (objective.py).

    Attributes:
        step: what was read for the current step.
        losses: float64 [dp * micro-batches], the current step's loss sums of all replicas' micro-batches: those of this
            replica have values, the others are zero.
        scale: what the losses that backward starts from are multiplied by besides (training/loss_scale.py: LossScale).
        sums: float64 [1 + 2 * metrics, dp * micro-batches]: the losses, then sum and count of each metric.
        error: why loss or metrics of the current step cannot be used, on this rank; empty if they can.
    """

    step: StepBatch
    scale = 1.0

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        tp: Communicator,
        model: Transformer,
        device: torch.device,
        objective: Objective,
    ) -> None:
        self._vocab_size, self._tp, self._model = config.model.vocab_size, tp, model
        self._objective, self.error = objective, ""
        num_micro_batches = config.train.num_micro_batches
        self._first_number = mesh.at.dp * num_micro_batches
        num_rows, num_places = 1 + 2 * len(objective.metrics), mesh.shape.dp * num_micro_batches
        self.sums = torch.zeros(num_rows, num_places, dtype=torch.float64, device=device)
        self.losses, self._no_metrics = self.sums[0], self.sums.new_empty(0)
        model.keeps_hidden = not objective.is_plain
        # Whether numbers of tp ranks are compared; and what was computed of this step on the last stage.
        self._compares = not objective.is_plain and tp.size > 1
        self._found: Tensor | None = None

    def clear(self) -> None:
        """Forget the step before."""
        self.sums.zero_()
        self.error, self._found = "", None

    def number_of(self, microbatch: int) -> int:
        """Return the number, counted over all replicas, of a micro-batch of this replica."""
        return self._first_number + microbatch

    def begin(self, microbatch: int) -> None:
        """See Batch."""
        position, documents = self._model.position, self.step.given.documents
        position.microbatch = self.number_of(microbatch)
        position.documents = documents[microbatch] if documents else None

    def tokens(self, microbatch: int) -> Tensor:
        """See Batch."""
        return self.step.given.tokens[microbatch]

    def loss(self, y: Tensor, microbatch: int) -> Tensor:
        """Return the loss of logits y, summed over the micro-batch, times 1 / the step's count and the loss scale.

        One that cannot be used is NaN, and `error` says why: other ranks wait for this one's backward.
        """
        loss = self._evaluated(y, microbatch)
        return loss * (self.step.loss_scale * self.scale).to(loss.dtype)

    def _evaluated(self, y: Tensor, microbatch: int) -> Tensor:
        batch, number = self.step.given.of(microbatch), self.number_of(microbatch)
        rows = batch.seq if batch.documents is None else batch.documents
        output = LastOutput(y, self._vocab_size, self._tp, rows, self._model.take_hidden())
        count = self.step.counts[microbatch] if self.step.counts else 0.0
        try:
            found = self._objective.evaluate(output, batch, count)
        except ObjectiveError as error:
            self.error, self.losses[number] = str(error), torch.nan
            return y.flatten()[0] * torch.nan
        self.losses[number] = found.loss.detach()
        for row, numbers in enumerate(found.metrics):
            for part, value in enumerate(numbers):
                self.sums[1 + 2 * row + part, number] = value
        if self._objective.is_plain or output.has_read_logits:
            return found.loss
        # A loss of hidden states alone: backward goes through the head all the same, whose gradient is awaited.
        return found.loss + y.flatten()[:0].sum().to(found.loss.dtype)

    def sum_over_replicas(self, dp: Communicator) -> tuple[Tensor, Tensor]:
        """Sum the step's numbers over replicas; collective over them, on the last stage.

        Returns: float64 [], the step's loss, and [metrics], the metrics; a metric whose count is 0 is NaN.
        """
        dp.all_reduce_(self.sums)
        loss = self.losses.sum() * self.step.loss_scale
        means = self._no_metrics
        if self._objective.metrics:
            of_metrics, counts = self.sums[1:].sum(1).view(-1, 2).unbind(1)
            means = of_metrics / counts
        if self._compares:
            self._found = torch.cat([loss[None], means])
        return loss, means

    @property
    def num_compared(self) -> int:
        """How many numbers `compared` returns."""
        return 0 if self._objective.is_plain else 1 + 2 * self._compares * (1 + len(self._objective.metrics))

    def compared(self) -> Tensor:
        """Return numbers, float64 [num_compared], whose largest over all ranks `problem` reads; none is NaN."""
        if self._objective.is_plain:
            return self.sums.new_empty(0)
        failed = self.sums.new_full((1,), bool(self.error))
        if not self._compares:
            return failed
        if self._found is None:
            return torch.cat([failed, self.sums.new_full((self.num_compared - 1,), -torch.inf)])
        largest = torch.finfo(torch.float64).max
        found = self._found.nan_to_num(nan=largest, posinf=largest, neginf=-largest)
        return torch.cat([failed, found, -found])

    def problem(self, largest: list[float]) -> str:
        """Return why the step's loss or metrics cannot be used, equal on all ranks but for `error`; empty if they can.

        Args:
            largest: of all ranks, of what `compared` has returned.
        """
        failed, *numbers = largest
        if failed:
            return "a rank's loss cannot be used"
        names = ["the loss", *(f"metric {name}" for name in self._objective.metrics)]
        for name, high, low in zip(names, numbers[: len(names)], numbers[len(names) :], strict=False):
            # A metric may be a sum whose parts cancel; a loss is what is trained on.
            least = 0.0 if name == names[0] else 1.0
            if high + low > _MOST_APART * max(abs(high), abs(low), least):
                return (
                    f"all tp ranks must compute the same: {name} is {-low:g} on one and {high:g} on another: make it "
                    "of the output's values and the batch alone, and of nothing that depends on the rank"
                )
        return ""
