"""The training steps that are timed against each other: ours, and torch's with two kinds of state.

torch's model is compiled and updated by its fused AdamW. What is kept between its steps is either in the weights' own
dtype, which is less than we keep, or as ours: masters, moments and sums of gradients in float32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from tpkernels.random import normal_block

from benchmarks.training.torch_model import LlamaStage
from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.layout.parameters import stage_specs
from tpengine.runs.trainer import Trainer

WARM_STEPS = 2
# Of the logarithm of the vocabulary: where a model without knowledge begins.
_FIRST_LOSS = 0.1


class Step(Protocol):
    """A training step that can be made again and again.

    Attributes:
        loss: of the last step.
        first_loss: of the first one, once `checked` has looked at it.
    """

    loss: float
    first_loss: float

    def seconds(self) -> float:
        """Run a step, wait for the device, and return what it took."""


class OwnStep:
    """A step of ours, and how long the host took to launch it."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._trainer, self._step = Trainer(config, open_corpus(config), device), 0
        self.host_seconds, self.loss, self.first_loss = 0.0, math.nan, math.nan

    def seconds(self) -> float:
        """Run a step; it ends with a wait for the device."""
        begin = time.perf_counter()

        def tell() -> tuple[float, ...]:
            self.host_seconds = time.perf_counter() - begin
            return ()

        self.loss = self._trainer.step.run(self._step, tell).loss
        self._step += 1
        return time.perf_counter() - begin


class TorchState(Protocol):
    """What torch's step keeps of the weights between its steps.

    Attributes:
        masters: what AdamW updates; `.grad` has their gradients' sums when `after_backward` has seen every micro-batch.
    """

    masters: list[Parameter]

    def after_backward(self) -> None:
        """Do what follows the backward of a micro-batch."""

    def after_update(self) -> None:
        """Do what follows the update of the masters."""


class StateOfWeights:
    """Weights, moments and gradients in the weights' dtype: torch adds each micro-batch's to `.grad`."""

    def __init__(self, weights: Iterable[Parameter]) -> None:
        self.masters = list(weights)

    def after_backward(self) -> None:
        """Nothing is left to do."""

    def after_update(self) -> None:
        """Free the gradients: those of the next step begin anew."""
        for weight in self.masters:
            weight.grad = None


class StateInFloat32:
    """Masters, moments and sums of gradients in float32; the weights are the masters' copies.

    A gradient is added as soon as backward has it, and freed. The first of a step is written, so that no sum is zeroed.
    """

    def __init__(self, weights: Iterable[Parameter], values: Iterable[Tensor]) -> None:
        self._weights = list(weights)
        self.masters = [Parameter(value) for value in values]
        self._begins = True
        for weight, master in zip(self._weights, self.masters, strict=True):
            total = torch.zeros_like(master)
            master.grad = total
            weight.register_post_accumulate_grad_hook(self._adder(total))

    def _adder(self, total: Tensor) -> Any:
        def add(weight: Tensor) -> None:
            assert weight.grad is not None, "called when it has been accumulated"
            if self._begins:
                total.copy_(weight.grad)
            else:
                total.add_(weight.grad)
            weight.grad = None

        return add

    def after_backward(self) -> None:
        """Add the next micro-batch's gradients to these."""
        self._begins = False

    @torch.no_grad()
    def after_update(self) -> None:
        """Round the masters into the weights; the next gradients are the first of a step."""
        weights: list[Tensor] = [*self._weights]
        masters: list[Tensor] = [*self.masters]
        torch._foreach_copy_(weights, masters)
        self._begins = True


class TorchStep:
    """The same model and batches as ours in torch.

    Args:
        config: of ours.
        device: of the model.
        compiles: whether torch compiles it.
        in_float32: whether masters, moments and sums of gradients are in float32, as ours are; else all of them are in
            the weights' dtype.
    """

    def __init__(self, config: Config, device: torch.device, *, compiles: bool, in_float32: bool) -> None:
        self._config, self._device, self._step = config, device, 0
        train, optim = config.train, config.optim
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, train.dtype))
        try:
            with device:
                model = LlamaStage(config.model, train.seq_len, (0, config.model.num_layers))
        finally:
            torch.set_default_dtype(before)
        values = _initial(model, config, device)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.copy_(value)
        self._model, self._corpus, self.loss, self.first_loss = model, open_corpus(config), math.nan, math.nan
        self._loss_of: Any = torch.compile(self._loss) if compiles else self._loss
        self._state: TorchState = (
            StateInFloat32(model.parameters(), values) if in_float32 else StateOfWeights(model.parameters())
        )
        self._optimizer = torch.optim.AdamW(
            self._state.masters, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True
        )

    def _loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self._model(tokens).flatten(0, 1).float(), labels.flatten())

    def seconds(self) -> float:
        """Run a step, and wait for the device."""
        begin, train = time.perf_counter(), self._config.train
        num_sequences = train.num_micro_batches * train.micro_batch_size
        batch = self._corpus.train.batch(self._step * num_sequences, num_sequences)
        tokens, labels = (torch.from_numpy(part).to(self._device).split(train.micro_batch_size) for part in batch)
        losses = []
        for x, y in zip(tokens, labels, strict=True):
            loss = self._loss_of(x, y) / train.num_micro_batches
            loss.backward()
            self._state.after_backward()
            losses.append(loss.detach())
        clip = self._config.optim.clip_norm
        if clip:
            torch.nn.utils.clip_grad_norm_(self._state.masters, clip)
        self._optimizer.step()
        self._state.after_update()
        self._step += 1
        self.loss = float(sum(losses))
        return time.perf_counter() - begin


def _initial(model: LlamaStage, config: Config, device: torch.device) -> list[Tensor]:
    """Return the float32 values with which ours begins, in the order of the model's parameters."""
    specs = {spec.name: spec for spec in stage_specs(config.model, 1, 0, config.model.num_layers)}
    values = []
    for name, parameter in model.named_parameters():
        spec, size = specs[name], tuple(parameter.shape)
        if spec.init_std is None:
            values.append(torch.ones(size, device=device))
            continue
        drawn = normal_block(
            config.train.seed, name, spec.shape, (0,) * len(size), size, std=spec.init_std, device=device
        )
        values.append(drawn)
    return values


def checked(side: Step, config: Config) -> str:
    """Run the first steps; return whether the loss begins where a model without knowledge does, and falls.

    It falls if any of the steps behind the first is lower: with so short a warm-up torch's goes 10.4, 8.6, 15.6.
    """
    side.seconds()
    first, want = side.loss, math.log(config.model.vocab_size)
    side.first_loss = first
    lowest = math.inf
    for _ in range(WARM_STEPS):
        side.seconds()
        lowest = min(lowest, side.loss)
    name = type(side).__name__
    if not abs(first - want) <= _FIRST_LOSS * want:
        return f"failed: {name}: the loss must begin near {want:.2f}: got {first:.2f}"
    if not math.isfinite(side.loss):
        return f"failed: {name}: the loss must be finite: got {side.loss}"
    return "passed" if lowest < first else f"failed: {name}: the loss must fall: {first:.3f}, then {lowest:.3f}"
