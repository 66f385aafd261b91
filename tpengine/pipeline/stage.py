"""One chunk of the model at run time: forward and backward of micro-batches, and what must live between them.

A stage drives any callable that maps a tensor to a tensor; it knows no layers and no transport. The first asks the
batch for a micro-batch's input, the last for its loss. Of each micro-batch in flight a stage keeps the input, whose
gradient goes upstream, and where backward enters the graph. The output itself is given away by the time it has been
sent: backward needs its place in the graph (`torch.autograd.graph.GradientEdge`), not its values, unless an operation
has saved them, which keeps them by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Batch(Protocol):
    """The micro-batches of a pass, as the stages of one rank see them."""

    def begin(self, microbatch: int) -> None:
        """Take note that this micro-batch is computed next, forward or backward: dropout depends on it."""

    def tokens(self, microbatch: int) -> Tensor:
        """Return the input of the model; asked for by the first chunk."""

    def loss(self, y: Tensor, microbatch: int) -> Tensor:
        """Return the scalar that backward starts from, or whatever ends a forward pass; asked for by the last chunk."""


class Stage:
    """Forward and backward of one chunk of the model.

    Args:
        chunk: x -> y, recorded by autograd.
        batch: the micro-batches.
        is_first, is_last: whether the chunk begins or ends the model.
        recompute: keep only the input between forward and backward, which runs forward, and the loss, once more.
        apart: what leaves the stage, copied if it lies in memory that may be written again as soon as the pass that has
            made it has ended: a receive slot, where the stage makes views. Default: as it is.

    Memory: inputs and graphs of the micro-batches between their F and their B.
    """

    def __init__(
        self,
        chunk: Callable[[Tensor], Tensor],
        batch: Batch,
        *,
        is_first: bool,
        is_last: bool,
        recompute: bool = False,
        apart: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self._chunk, self._batch = chunk, batch
        self._is_first, self._is_last = is_first, is_last
        self._recompute, self._apart = recompute, apart
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        # Where backward enters; None where nothing before it needs a gradient, or nothing is kept.
        self._ends: dict[int, Tensor | GradientEdge | None] = {}
        self._output_grads: dict[int, Tensor] = {}
        self._input_grads: dict[int, Tensor] = {}

    def begin(self, microbatch: int) -> None:
        """Say that this micro-batch comes next; for what is computed outside the passes below: a weight half."""
        self._batch.begin(microbatch)

    def receive_input(self, microbatch: int, x: Tensor) -> None:
        """Take the upstream stage's output; it must stay unchanged until this micro-batch's backward."""
        self._inputs[microbatch] = x

    def receive_output_grad(self, microbatch: int, dy: Tensor) -> None:
        """Take the downstream stage's gradient; it must stay unchanged until this micro-batch's backward."""
        self._output_grads[microbatch] = dy

    def take_output(self, microbatch: int) -> Tensor:
        """What the downstream stage needs, without history; handed out once."""
        return self._outputs.pop(microbatch)

    def take_input_grad(self, microbatch: int) -> Tensor:
        """What the upstream stage needs; handed out once."""
        return self._input_grads.pop(microbatch)

    def forward(self, microbatch: int) -> None:
        """Run F; keep the graph for backward, or with `recompute` the input alone."""
        self._batch.begin(microbatch)
        if self._recompute:
            with torch.no_grad():
                self._run(microbatch)
            self._ends[microbatch] = None
        else:
            self._ends[microbatch] = self._end_of(self._run(microbatch))

    def backward(self, microbatch: int) -> None:
        """Run B, or I where sinks put weight gradients off, and forget the micro-batch."""
        self._batch.begin(microbatch)
        end, dy = self._ends.pop(microbatch), self._output_grads.pop(microbatch, None)
        if self._recompute:
            end = self._end_of(self._run(microbatch))
        self._outputs.pop(microbatch, None)
        if isinstance(end, GradientEdge):
            torch.autograd.backward([end], [dy])
        elif end is not None:
            # A loss that needs no gradient is a mistake that autograd names.
            torch.autograd.backward(end)
        x = self._inputs.pop(microbatch, None)
        if x is not None:
            assert x.grad is not None, f"micro-batch {microbatch}: backward gave no gradient to the stage's input"
            # Not both: a weight half may keep x until later.
            self._input_grads[microbatch], x.grad = self._apart(x.grad), None

    @torch.no_grad()
    def forward_only(self, microbatch: int) -> None:
        """Run F without history; the output waits to be sent."""
        self._batch.begin(microbatch)
        x = self._batch.tokens(microbatch) if self._is_first else self._inputs.pop(microbatch)
        y = self._chunk(x)
        if self._is_last:
            self._batch.loss(y, microbatch)
        else:
            self._outputs[microbatch] = self._apart(y)

    def _run(self, microbatch: int) -> Tensor:
        """Compute the output, or the loss, of a micro-batch; what the downstream stage needs waits to be sent."""
        if self._is_first:
            y = self._chunk(self._batch.tokens(microbatch))
        else:
            # detach: a leaf of its own that shares the received memory and collects the gradient
            x = self._inputs[microbatch].detach().requires_grad_()
            self._inputs[microbatch] = x
            y = self._chunk(x)
        if self._is_last:
            return self._batch.loss(y, microbatch)
        self._outputs[microbatch] = self._apart(y.detach())
        return y

    def _end_of(self, y: Tensor) -> Tensor | GradientEdge | None:
        if self._is_last:
            return y
        # A first stage may have nothing to train.
        return get_gradient_edge(y) if y.requires_grad else None
