"""One pipeline stage at run time: forward and backward of micro-batches, and what must live between them.

A stage drives any callable that maps a tensor to a tensor; it knows no layers and no transport. What it keeps: the
input of each micro-batch in flight (its gradient goes upstream) and the output (its gradient comes from downstream).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Stage:
    """Forward and backward of one chunk of the model.

    Args:
        forward: x -> y, recorded by autograd.
        first_input: micro-batch -> model input, on the first chunk; None elsewhere.
        loss: (y, micro-batch) -> scalar that backward starts from, on the last chunk; None elsewhere.

    Memory: inputs and outputs of the micro-batches between their F and their B.
    """

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        first_input: Callable[[int], Tensor] | None,
        loss: Callable[[Tensor, int], Tensor] | None,
    ) -> None:
        self._forward, self._first_input, self._loss = forward, first_input, loss
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._output_grads: dict[int, Tensor] = {}
        self._input_grads: dict[int, Tensor] = {}

    def receive_input(self, microbatch: int, x: Tensor) -> None:
        """Take the upstream stage's output; it must stay unchanged until this micro-batch's backward."""
        self._inputs[microbatch] = x

    def receive_output_grad(self, microbatch: int, dy: Tensor) -> None:
        """Take the downstream stage's gradient; it must stay unchanged until this micro-batch's backward."""
        self._output_grads[microbatch] = dy

    def output(self, microbatch: int) -> Tensor:
        """What the downstream stage needs, without history."""
        return self._outputs[microbatch].detach()

    def take_output(self, microbatch: int) -> Tensor:
        """What the downstream stage needs of a forward-only pass; handed out once."""
        return self._outputs.pop(microbatch)

    def take_input_grad(self, microbatch: int) -> Tensor:
        """What the upstream stage needs; handed out once."""
        return self._input_grads.pop(microbatch)

    def forward(self, microbatch: int) -> None:
        """Run F and keep the graph for backward."""
        if self._first_input is not None:
            y = self._forward(self._first_input(microbatch))
        else:
            # detach: a leaf of its own that shares the received memory and collects the gradient
            x = self._inputs[microbatch].detach().requires_grad_()
            self._inputs[microbatch] = x
            y = self._forward(x)
        self._outputs[microbatch] = y if self._loss is None else self._loss(y, microbatch)

    def backward(self, microbatch: int) -> None:
        """Run B and forget the micro-batch."""
        y, dy = self._outputs.pop(microbatch), self._output_grads.pop(microbatch, None)
        # A first stage may have nothing to train; a loss that needs no gradient is a mistake that autograd names.
        if y.requires_grad or self._loss is not None:
            torch.autograd.backward(y, dy)
        x = self._inputs.pop(microbatch, None)
        if x is not None:
            assert x.grad is not None, f"micro-batch {microbatch}: backward gave no gradient to the stage's input"
            self._input_grads[microbatch] = x.grad

    @torch.no_grad()
    def forward_only(self, microbatch: int) -> None:
        """Run F without history; the output waits to be sent."""
        x = self._first_input(microbatch) if self._first_input is not None else self._inputs.pop(microbatch)
        y = self._forward(x)
        if self._loss is None:
            self._outputs[microbatch] = y
        else:
            self._loss(y, microbatch)
