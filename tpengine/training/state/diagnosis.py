"""Find where a step stopped being finite: the first tensor, its layer and its micro-batch.

The step is computed once more, without its update. A probe checks the weights first, then for each micro-batch every
layer's output in forward and every gradient in backward. Each rank holds different tensors and tells what it found
first; the first of all is reported by all. If the fault does not occur again, though weights and data are the same, the
machine is suspected, and the report says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpengine.distributed.agreement import all_gather_json
from tpengine.layout.parameters import stage_specs
from tpengine.training.state.training_state import hf_name
from tpengine.training.train_step import TrainStep

# Micro-batch, forward before backward, depth in that direction, name.
_Event = tuple[int, int, int, str]
_FORWARD, _BACKWARD = range(2)
_BEFORE_ALL = -1


@dataclass(frozen=True)
class Finding:
    """The first tensor that was not finite.

    Attributes:
        tensor: its kind and the name that it is saved under.
        layer: number of its layer; None outside the layers.
        micro_batch: counted from 0 over all replicas; None if it belongs to none, or is unknown.
        again: whether it occurred again when the step was computed again.
    """

    tensor: str
    layer: int | None
    micro_batch: int | None
    again: bool = True

    def __str__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        micro_batch = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        accident = "" if self.again else " (not when the step was computed again: suspect the machine)"
        return f"{self.tensor}{layer}{micro_batch}{accident}"


def find_first(train_step: TrainStep, step: int) -> Finding:
    """Find what was not finite first in the step that has just been skipped; collective, equal on all ranks.

    Args:
        train_step: has run the step.
        step: 0-based number.

    Cost: a step, and a pass over the gradients for each of its micro-batches.
    """
    # Compute the step again under the probe; before that, note what overflowed the first time.
    before = _overflowing(train_step)
    probe = _Probe(train_step)
    with probe:
        train_step.compute_again(step, probe)
    probe.see_losses()
    # The first event over all ranks.
    events = [tuple(event) for event in all_gather_json(probe.first) if event is not None]
    if events:
        micro_batch, _, _, name = min(events)
        return Finding(name, _layer_of(name), None if micro_batch == _BEFORE_ALL else micro_batch)
    # All elements were finite: then a square or a sum of squares overflowed.
    again = _overflowing(train_step)
    name = f"the norm of the gradient of {again or before}" if again or before else "the loss"
    return Finding(name, _layer_of(name), None, again=bool(again))


class _Probe:
    """Looks for the first event on one rank; inside its context also in the outputs of layers."""

    def __init__(self, train_step: TrainStep) -> None:
        self._step, self._state = train_step, train_step.state
        self.first: _Event | None = None
        model = self._state.part.config.model
        specs = stage_specs(model, self._state.model.parts.table_size, 0, model.num_layers)
        self._depths = {spec.name: depth for depth, spec in enumerate(specs)}
        self._summed: set[int] = set()
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        state, num_layers = self._state, self._state.part.config.model.num_layers
        for name, weight in state.weights.items():
            if not _is_finite(weight):
                saved = _parameter_of(name)
                self._note(_BEFORE_ALL, _FORWARD, self._depths[saved], f"weight {hf_name(saved)}")
        model: Any = state.model
        if model.is_first:
            self._hook(model.embed_tokens, 0, "model.embed_tokens")
        for number, block in model.layers.items():
            self._hook(block, 1 + int(number), f"model.layers.{number}")
        if model.is_last:
            self._hook(model.norm, num_layers + 1, "model.norm")
            self._hook(model.lm_head, num_layers + 2, "lm_head")

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def before_sum(self, bucket: int) -> None:
        """Look at a bucket before it is summed: see train_step.Probe."""
        self._look([bucket])
        self._summed.add(bucket)

    def after_backward(self) -> None:
        """Look at the buckets that are not summed yet: see train_step.Probe."""
        self._look(index for index in self._state.buckets.flat if index not in self._summed)

    def see_losses(self) -> None:
        """Look at the losses of all micro-batches, on the last stage."""
        if self._state.model.is_last:
            for micro_batch, loss in enumerate(self._step.batch.losses.tolist()):
                if not torch.isfinite(torch.tensor(loss)):
                    self._note(micro_batch, _FORWARD, self._state.part.config.model.num_layers + 3, "the loss")

    def _hook(self, module: nn.Module, depth: int, name: str) -> None:
        def see(_: nn.Module, __: Any, output: Tensor) -> None:
            if not _is_finite(output):
                micro_batch = self._state.model.position.microbatch
                self._note(micro_batch, _FORWARD, depth, f"the output of {name}")

        self._hooks.append(module.register_forward_hook(see))

    def _look(self, buckets: Iterable[int]) -> None:
        gradients, micro_batch = self._state.buckets, self._state.model.position.microbatch
        for index in buckets:
            if not gradients.has_memory(index) or _is_finite(gradients.flat[index]):
                continue
            for name in self._state.part.layout.buckets[index].layout.names:
                if not _is_finite(gradients.gradients[name]):
                    saved = _parameter_of(name)
                    self._note(micro_batch, _BACKWARD, -self._depths[saved], f"the gradient of {hf_name(saved)}")

    def _note(self, micro_batch: int, way: int, depth: int, name: str) -> None:
        event = micro_batch, way, depth, name
        self.first = event if self.first is None else min(self.first, event)


def _overflowing(train_step: TrainStep) -> str:
    """Return the first parameter, in backward's order, whose gradient's sum of squares is not finite; "" if none is."""
    state = train_step.state
    model, table_size = state.part.config.model, state.model.parts.table_size
    finite = train_step.squares.isfinite().view(-1, table_size).all(1).tolist()
    specs = stage_specs(model, table_size, 0, model.num_layers)
    bad = [spec.name for spec, is_finite in zip(specs, finite, strict=True) if not is_finite]
    return hf_name(bad[-1]) if bad else ""


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())


def _parameter_of(name: str) -> str:
    """Return the name of the parameter that a piece or a gradient buffer belongs to."""
    return re.sub(r"[\[#].*", "", name)


def _layer_of(name: str) -> int | None:
    found = re.search(r"\blayers\.(\d+)\b", name)
    return int(found[1]) if found else None
