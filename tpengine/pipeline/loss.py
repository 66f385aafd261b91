"""The loss of a pipeline's step: what each micro-batch weighs in it, and the sum that the step returns."""

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
        num_micro_batches: of a step.
        num_replicas: R, whose gradients are averaged afterwards.
        output: shape and dtype of the outputs.
        device: where they lie.

    Attributes:
        counts: whether there is a `count`.
        sums: [the step's loss, by how much the loss's own numbers of targets differ from those counted], of this rank.
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
        """Look at a step's targets before anything runs, where the loss is computed; return how many are valid.

        The first time the loss is called once, on outputs of zeros, so that what it returns is known.

        Raises:
            ValueError: the loss or `count` fails, or returns something else than is asked for.
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
        """Begin a step of so many valid targets over all replicas.

        Raises:
            ValueError: there are none, and they are counted.
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
        """The micro-batch's share of the step's loss."""
        value = self._loss(output, target)
        if isinstance(value, tuple):
            value, number = value
            self.sums[1] += abs(number - self._numbers[microbatch])
        loss = value / self._divisor
        self.sums[0] += loss.detach()
        return loss

    def total(self, sums: Tensor) -> float:
        """The step's loss from `sums` of all ranks.

        Raises:
            ValueError: the loss has counted other numbers of targets than `count`.
        """
        loss, difference = sums.tolist()
        if difference:
            raise ValueError(
                f"loss and count must find the same valid targets: their numbers differ by {difference:g} over the "
                "step's micro-batches: make both leave out the same ones"
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
