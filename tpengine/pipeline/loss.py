"""The loss of a pipeline's step: the weight of each micro-batch, and the sum that the step returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tpengine.plan import TensorSpec

Loss = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor | int]]
Count = Callable[[Tensor], Tensor | int]


class PipelineLoss:
    """The loss of a step's micro-batches.

        without `count`:  mean over micro-batches of loss(output, target)
        with `count`:     R / N * sum over micro-batches of loss(output, target), N targets in R replicas

    Args:
        loss: (output, target) of a micro-batch -> a mean; with `count` a sum, or (sum, number of valid targets).
        count: target of a micro-batch -> number of valid targets in it.
        num_micro_batches: per step.
        num_replicas: R; the gradients of the replicas are averaged afterwards.
        output: shape and dtype of the outputs.
        device: where the outputs lie.

    Attributes:
        counts: whether there is a `count`.
        sums: this rank's [loss of the step, difference between the numbers of targets that `loss` and `count` give].
    """

    def __init__(
        self,
        loss: Loss,
        count: Count | None,
        num_micro_batches: int,
        num_replicas: int,
        output: TensorSpec,
        device: torch.device,
    ) -> None:
        self._loss, self._count, self._output, self._device = loss, count, output, device
        self._num_replicas = num_replicas
        self._was_tried = False
        self._divisor: float = num_micro_batches
        self._numbers = torch.zeros(num_micro_batches, dtype=torch.int64, device=device)
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)

    @property
    def counts(self) -> bool:
        """Whether valid targets are counted."""
        return self._count is not None

    def prepare(self, targets: Sequence[Tensor]) -> int:
        """Check the loss and a step's targets before anything runs; return how many targets are valid.

        Only the rank that computes the loss calls this. The first call also tries the loss, on outputs of zeros.

        Raises:
            ValueError: the loss or `count` fails, or does not return what it should.
        """
        if not self._was_tried:
            self._try(targets[0])
            self._was_tried = True
        if self._count is None:
            return 0
        try:
            numbers = [torch.as_tensor(self._count(target), device=self._device) for target in targets]
            self._numbers = torch.stack([number.reshape(()) for number in numbers]).to(torch.int64)
        except Exception as error:
            raise ValueError(
                f"count must return the number of valid targets: it failed on targets {list(targets[0].shape)}: "
                f"{error}: return an int or a tensor of one number"
            ) from error
        return int(self._numbers.sum())

    def begin(self, num_targets: int) -> None:
        """Begin a step with `num_targets` valid targets over all replicas.

        Raises:
            ValueError: `count` finds no valid target.
        """
        self.sums.zero_()
        if self._count is None:
            return
        if num_targets < 1:
            raise ValueError(
                f"a step needs at least one valid target: count says {num_targets} over all micro-batches and "
                "replicas: leave such a batch out"
            )
        self._divisor = num_targets / self._num_replicas

    def weighted(self, output: Tensor, target: Tensor, microbatch: int) -> Tensor:
        """Return the micro-batch's share of the step's loss, and add it to `sums`."""
        value = self._loss(output, target)
        if isinstance(value, tuple):
            value, number = value
            self.sums[1] += abs(number - self._numbers[microbatch])
        loss = value / self._divisor
        self.sums[0] += loss.detach()
        return loss

    def total(self, sums: Tensor) -> float:
        """Return the step's loss, given the sum of `sums` over all ranks.

        Raises:
            ValueError: the loss and `count` find different numbers of valid targets.
        """
        loss, difference = sums.tolist()
        if difference:
            raise ValueError(
                f"loss and count must find the same valid targets: their numbers differ by {difference:g} over the "
                "step's micro-batches: make both leave out the same targets"
            )
        return float(loss)

    @torch.no_grad()
    def _try(self, target: Tensor) -> None:
        output = torch.zeros(self._output.shape, dtype=getattr(torch, self._output.dtype), device=self._device)
        devices = [self._device] if self._device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices):
                returned = self._loss(output, target)
        except Exception as error:
            raise ValueError(
                f"the loss must take an output and its target: on {self._output} and {list(target.shape)} it fails: "
                f"{error}: check the targets' shape and dtype"
            ) from error
        if isinstance(returned, tuple) and self._count is None:
            raise ValueError(
                "a loss that returns (sum, number of valid targets) is divided by their number over the whole batch, "
                "which is counted before it: pass count, target -> number, or return a mean"
            )
        value = returned[0] if isinstance(returned, tuple) and len(returned) == 2 else returned
        if not isinstance(value, Tensor) or value.dim() != 0:
            got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            wanted = "sum, or (sum, number of valid targets)" if self._count else "mean"
            raise ValueError(f"loss must return a scalar: got {got}: return its {wanted}")
