"""The list of steps that were skipped because loss or gradient was not finite, and the limit of so many in a row.

That a step is skipped is decided on the device (training/train_step.py: TrainStep._clip).

    skipped.jsonl    one JSON object per step, on disk as soon as it is skipped:
                     {"step": 13, "counted_from": 1, "samples": [384, 416], "layer": 3, "micro_batch": 1,
                      "tensor": "the gradient of model.layers.3.mlp.up_proj.weight", "loss": "2.25", "grad_norm": "nan"}

Which tensor was not finite first is found by computing the step once more, without its update. Until then `tensor` is
null; it stays null if the run ends meanwhile. `samples` is a half-open range of the run's order. The data of a step is
a function of its number, so that a restarted run would meet the same fault again. It leaves the listed steps out
without computing them, and so gets further each time. To have a step computed, remove its line.

A probe checks the weights first, then for each micro-batch every layer's output and the scores of its router, token by
token, in forward, and every gradient in backward. Each rank holds different tensors and tells what it found first; the
first of all is reported by all. Replicas that share experts compute their micro-batches together: what is no number in
one of them is in experts' gradients of all, so that all their forward passes come before. If the fault does not occur
again, though weights and data are the same, the machine is suspected, and the report says so.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpengine import journal
from tpengine.distributed.agreement import all_gather_json, broadcast_json
from tpengine.files import keep_aside
from tpengine.layers.routing import Routed, Router
from tpengine.layout.parameters import hf_name, stage_specs
from tpengine.observe.activity import Activity
from tpengine.training.loss_scale import LossScale
from tpengine.training.planned_run import PlannedRun, RunError
from tpengine.training.spikes import StepResult
from tpengine.training.train_step import TrainStep

# Which turn of micro-batches, forward before backward, depth in that direction, micro-batch, name.
_Event = tuple[int, int, float, int, str]
_FORWARD, _BACKWARD = range(2)
_BEFORE_ALL = -1
FILE_NAME = "skipped.jsonl"


@dataclass(frozen=True)
class FirstNonFinite:
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


def find_first(train_step: TrainStep, step: int) -> FirstNonFinite:
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
    probe.see_scores()
    # The first event over all ranks.
    events = [tuple(event) for event in all_gather_json(probe.first) if event is not None]
    if events:
        *_, micro_batch, name = min(events)
        return FirstNonFinite(name, _layer_of(name), None if micro_batch == _BEFORE_ALL else micro_batch)
    # All elements were finite: then a square or a sum of squares overflowed.
    again = _overflowing(train_step)
    name = f"the norm of the gradient of {again or before}" if again or before else "the loss"
    return FirstNonFinite(name, _layer_of(name), None, again=bool(again))


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
            for router in block.modules():
                if isinstance(router, Router):
                    self._hook_router(router, int(number))
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

    def see_scores(self) -> None:
        """Look at what the routers of all layers with experts have noted: scores come before their block's output."""
        loads = self._step.loads
        if loads is not None and (first := loads.first_without_number()) is not None:
            micro_batch, layer = first
            # Behind what hooks have seen: those know the token.
            self._note(micro_batch, _FORWARD, layer + 0.75, f"the scores of {_router_of(layer)}")

    def _hook(self, module: nn.Module, depth: int, name: str) -> None:
        def see(_: nn.Module, __: Any, output: Tensor) -> None:
            if not _is_finite(output):
                micro_batch = self._state.model.position.microbatch
                self._note(micro_batch, _FORWARD, depth, f"the output of {name}")

        self._hooks.append(module.register_forward_hook(see))

    def _hook_router(self, router: Router, layer: int) -> None:
        def see(_: nn.Module, __: Any, routed: Routed) -> None:
            places = (~routed.weights.detach().isfinite().all(1)).nonzero()
            if len(places):
                # Where ranks share experts each routes its own tokens, one part of the micro-batch's behind the other.
                token = int(places[0]) + router.own_tokens * router.comm.rank * len(routed.weights)
                name = f"the scores of {_router_of(layer)} for token {token}"
                self._note(self._state.model.position.microbatch, _FORWARD, layer + 0.5 + 1e-10 * token, name)

        self._hooks.append(router.register_forward_hook(see))

    def _look(self, buckets: Iterable[int]) -> None:
        gradients, micro_batch = self._state.buckets, self._state.model.position.microbatch
        for index in buckets:
            if not gradients.has_memory(index) or _is_finite(gradients.flat[index]):
                continue
            for name in self._state.part.layout.buckets[index].layout.names:
                if not _is_finite(gradients.gradients[name]):
                    saved = _parameter_of(name)
                    self._note(micro_batch, _BACKWARD, -self._depths[saved], f"the gradient of {hf_name(saved)}")

    def _note(self, micro_batch: int, way: int, depth: float, name: str) -> None:
        part = self._state.part
        together = part.layout.ep > part.layout.tp and micro_batch != _BEFORE_ALL
        turn = micro_batch % part.config.train.num_micro_batches if together else micro_batch
        event = turn, way, depth, micro_batch, name
        self.first = event if self.first is None else min(self.first, event)


def _overflowing(train_step: TrainStep) -> str:
    """Return the first parameter, in backward's order, whose gradient's sum of squares is not finite; "" if none is."""
    state = train_step.state
    model, table_size = state.part.config.model, state.model.parts.table_size
    specs = stage_specs(model, table_size, 0, model.num_layers)
    finite = train_step.squares.isfinite().view(len(specs), -1).all(1).tolist()
    bad = [spec.name for spec, is_finite in zip(specs, finite, strict=True) if not is_finite]
    return hf_name(bad[-1]) if bad else ""


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())


def _router_of(layer: int) -> str:
    return f"model.layers.{layer}.mlp.gate"


def _parameter_of(name: str) -> str:
    """Return the name of the parameter that a piece or a gradient buffer belongs to."""
    return re.sub(r"[\[#].*", "", name)


def _layer_of(name: str) -> int | None:
    found = re.search(r"\blayers\.(\d+)\b", name)
    return int(found[1]) if found else None


def read_for_all(path: Path | None, read: Callable[[Path], list[Any]], what: str, *, resume: bool) -> list[Any]:
    """Return what a list says, equal on all ranks; collective.

    Args:
        path: the list on rank 0; None elsewhere.
        read: returns what JSON can hold.
        what: is listed, for the message.
        resume: whether the run continues another. If not, an earlier list is kept aside.

    Raises:
        RunError: on all ranks alike: it cannot be read.
    """
    found, problem = [], ""
    if path is not None:
        try:
            if not resume:
                keep_aside(path)
            found = read(path) if path.exists() else []
        except (OSError, ValueError) as error:
            problem = f"the list of {what} must be readable: {path}: {error}: mend or remove it"
    found, problem = broadcast_json([found, problem])
    if problem:
        raise RunError(problem)
    return found


def _read(path: Path) -> list[int]:
    steps = []
    for line in journal.read(path):
        if line.index is not None:
            steps.append(line.index)
        # The last line may be cut: its step will be computed again.
        elif line.text.endswith(b"\n"):
            raise ValueError(f"line {line.number} names no step")
    return steps


class SkippedSteps:
    """The skipped steps of a run; the constructor is collective.

    Args:
        planned: the run.
        activity: told what this rank does.
        run_dir: the run's directory on rank 0; None elsewhere. A run that does not continue another keeps an earlier
            list aside.

    Attributes:
        known: the steps that were skipped before this start, 0-based.

    Raises:
        RunError: on all ranks alike: the list cannot be read.
    """

    def __init__(self, planned: PlannedRun, activity: Activity, run_dir: Path | None) -> None:
        self._planned, self._activity, self._train = planned, activity, planned.config.train
        self._path = None if run_dir is None else run_dir / FILE_NAME
        self.known = frozenset(read_for_all(self._path, _read, "skipped steps", resume=planned.config.resume))
        self._skipped = set(self.known)
        self._in_a_row: list[int] = []

    def leaves_out(self, step: int) -> bool:
        """Return whether a step is to be left out, as it was skipped before this start; equal on all ranks."""
        return step in self.known

    def num_until(self, step: int) -> int:
        """Return how many steps up to and including this one were skipped, in this start and before."""
        return sum(skipped <= step for skipped in self._skipped)

    def note(self, step: int, result: StepResult, train_step: TrainStep) -> None:
        """Note a step that has been computed; if it was skipped, find out why and write it down. Collective.

        A step whose gradient overflowed with its loss scale is none of these: the scale has halved since.

        Args:
            step, result: its number, and what came of it.
            train_step: has run it.

        Raises:
            RunError: on all ranks alike: --train.nonfinite-steps steps in a row were skipped.
        """
        if not result.skipped or result.spiked:
            self._in_a_row = []
        if not result.is_not_finite:
            return
        train = self._train
        phase = self._planned.phases.at(step)
        self._skipped.add(step)
        self._in_a_row.append(step)
        record = {
            **journal.numbered(step),
            "samples": [phase.samples_before(step), phase.samples_before(step + 1)],
            "tensor": None,
            "layer": None,
            "micro_batch": None,
            "seen_again": None,
            "loss": str(result.loss),
            "grad_norm": str(result.grad_norm),
        }
        # Write at once: the run may end while the reason is sought.
        self._write_while_all_wait(record, f"a restart meets step {step + 1} again")
        # Find the first tensor that is not finite, and write it into the step's line.
        self._activity.begin("finding what is not finite")
        first = find_first(train_step, step)
        found = {
            "tensor": first.tensor,
            "layer": first.layer,
            "micro_batch": first.micro_batch,
            "seen_again": first.again,
        }
        self._write_while_all_wait({**record, **found}, f"it does not say what was first in step {step + 1}")
        numbers = f"loss {result.loss:.6g}, gradient norm {result.grad_norm:.6g}"
        if self._path is not None:
            self._say(f"step {step + 1} is skipped, its update is not finite: {numbers}, first {first}")
        if len(self._in_a_row) >= train.nonfinite_steps:
            steps = ", ".join(str(skipped + 1) for skipped in self._in_a_row[-train.nonfinite_steps :])
            raise RunError(
                f"updates must be finite: those of steps {steps}, --train.nonfinite-steps {train.nonfinite_steps} in a "
                f"row, were not{_scale_in_words(train_step.state.loss_scale)}; in the last {numbers}, first {first}: "
                "lower --optim.lr or lengthen --optim.warmup-steps; --resume goes on without these steps"
            )

    def go_back(self, num_steps: int) -> None:
        """Forget the skipped steps from `num_steps` on, because the run repeats them, some with other samples."""
        self.known = frozenset(step for step in self.known if step < num_steps)
        gone = {step for step in self._skipped if step >= num_steps}
        self._skipped -= gone
        self._in_a_row = []
        if not gone or self._path is None or not self._path.exists():
            return
        try:
            lines = [line for line in journal.read(self._path) if line.index not in gone]
            journal.write(self._path, lines, durable=True)
        except OSError as error:
            self._say(f"{self._path} cannot be written: {error}: it lists steps that the run repeats: remove them")

    def _write_while_all_wait(self, record: dict[str, Any], without: str) -> None:
        """Write a step's line on rank 0; collective. All ranks wait without a time limit, as the disk may be slow."""
        self._activity.begin("writing what is not finite", timed=False)
        self.write(record, without)
        broadcast_json()

    def write(self, record: dict[str, Any], without: str) -> None:
        """Write a step's line, replacing an earlier line of the step; the file is replaced whole.

        Args:
            record: the line.
            without: the consequence to print if it cannot be written.
        """
        if self._path is None:
            return
        try:
            lines = list(journal.read(self._path)) if self._path.exists() else []
            if lines and lines[-1].index in (None, journal.index_of(record)):
                lines.pop()
            journal.write(self._path, [*lines, record], durable=True)
        except OSError as error:
            self._say(f"{self._path} cannot be written: {error}: {without}")

    @staticmethod
    def _say(line: str) -> None:
        with contextlib.suppress(OSError):
            print(f"tpengine: {line}", file=sys.stderr, flush=True)


def _scale_in_words(scale: LossScale) -> str:
    return f", with the loss scale at its floor, {scale.value:g}" if scale.is_at_floor else ""
