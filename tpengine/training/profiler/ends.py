"""How much of an action is spent in the model's ends: the embedding, and norm, head and loss behind the last block.

Stages have equal layers, but only two have an end. What a stage takes without its end can be compared with the others;
flops alone do not say what an end takes, above all on a CPU. Begin and end are moments of the trace's clock, taken
where tensors enter and leave the modules, forward and back. Of backward's second half (W) nothing is known: there the
end's modules do not come up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from tpengine.model.transformer import Transformer
from tpengine.pipeline.executor import Clock
from tpengine.training.step_batch import TrainingBatch


class EndsMeter:
    """Takes the moments of a rank's ends while it runs a recorded step.

    Args:
        model: whose ends they are.
        batch: computes the losses.
        waited_ns: how long this rank has waited for tensor-parallel ranks so far: that is not counted.

    `begin` and `end` enclose a step.
    """

    def __init__(self, model: Transformer, batch: TrainingBatch, waited_ns: Callable[[], int]) -> None:
        self._model, self._batch, self._waited_ns = model, batch, waited_ns
        self._clock: Clock | None = None
        self._handles: list[RemovableHandle] = []
        # Of the batch, as it was: somebody else may have put another in place of its own.
        self._unwatched: dict[str, Any] = {}
        # Begin, end and the wait in between, of what the current action has passed.
        self._passed: list[tuple[Any, Any, int]] = []
        self._open: dict[str, tuple[Any, int]] = {}

    def begin(self, clock: Clock) -> None:
        """Take moments of this clock, from now on."""
        self._clock = clock
        model, batch = self._model, self._batch
        if model.is_first:
            self._around("embedding", model.embed_tokens, model.embed_tokens)
        if model.is_last:
            self._around("head", model.norm, model.lm_head)
            # The loss is no module. Its backward begins the head's.
            self._unwatched = {name: value for name, value in vars(batch).items() if name == "loss"}
            batch.loss = self._loss(batch.loss)  # type: ignore[method-assign, assignment]

    def end(self) -> None:
        """Take no moments any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open.clear()
        vars(self._batch).pop("loss", None)
        vars(self._batch).update(self._unwatched)
        self._unwatched = {}

    def passed(self) -> list[tuple[Any, Any, int]]:
        """Return begin, end and nanoseconds of waiting of each pass through an end since the last call."""
        found, self._passed = self._passed, []
        return found

    def seconds_of(self, passed: list[tuple[Any, Any, int]]) -> float:
        """Return how long passes took; waits for the device."""
        assert self._clock is not None, "passes were taken by a clock"
        ns = self._clock.ns
        return sum(max(0, ns(end) - ns(begin) - waited) for begin, end, waited in passed) * 1e-9

    def _around(self, name: str, first: Module, last: Module) -> None:
        """Watch an end: from the input of its first module to the output of its last, and back."""

        def enter(_: Module, inputs: tuple[Any, ...]) -> None:
            x = inputs[0]
            if x.requires_grad:
                x.register_hook(lambda _: self._close(f"{name} backward"))
            self._begin(name)

        def leave(_: Module, __: Any, y: Tensor) -> None:
            self._close(name)
            # A lookup has no input's gradient: what ends it is its node. The head's begins with the loss's.
            if name == "embedding" and y.grad_fn is not None:
                y.grad_fn.register_prehook(lambda _: self._begin(f"{name} backward"))
                y.grad_fn.register_hook(lambda *_: self._close(f"{name} backward"))

        self._handles += [first.register_forward_pre_hook(enter), last.register_forward_hook(leave)]

    def _loss(self, compute: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
        def loss(y: Tensor, microbatch: int) -> Tensor:
            self._begin("loss")
            value = compute(y, microbatch)
            self._close("loss")
            if value.requires_grad:
                value.register_hook(lambda _: self._begin("head backward"))
            return value

        return loss

    def _begin(self, name: str) -> None:
        if self._clock is not None:
            self._open[name] = self._clock.now(), self._waited_ns()

    def _close(self, name: str) -> None:
        if self._clock is not None and name in self._open:
            begin, waited = self._open.pop(name)
            self._passed.append((begin, self._clock.now(), self._waited_ns() - waited))
