"""The chunks of one pipeline rank at run time: forward and backward of micro-batches, and the handlers that run them.

A stage runs any callable that maps a tensor to a tensor; it knows no layers and no transport. The first stage asks the
batch for a micro-batch's input, the last for its loss. For each micro-batch in flight a stage keeps the input, whose
gradient goes upstream, and the point where backward enters the graph. It does not keep the output once that is sent:
backward needs the output's place in the graph (`torch.autograd.graph.GradientEdge`), not its values. If an operation
has saved the values, autograd keeps them.

Between chunks of different ranks a tensor is a transfer of the plan. Between neighbouring chunks of one rank it is
passed on directly, without an action. The trainer, evaluation and `Pipeline` all run on these handlers and add their
own for the other actions (gradient buckets, clipping, the update).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup
from tpkernels.again import same_choices
from tpkernels.exchange.mailbox import Mailbox

from tpengine.layers.gradient_sink import WeightHalves
from tpengine.pipeline.executor import Handler
from tpengine.pipeline.transfers import Transfers
from tpengine.plan import Action, Kind, Plan
from tpengine.plan.actions import TRANSFERS


class Batch(Protocol):
    """The micro-batches of a pass, as the stages of one rank see them."""

    def begin(self, microbatch: int) -> None:
        """Note which micro-batch is computed next, forward or backward: dropout depends on it."""

    def tokens(self, microbatch: int) -> Tensor:
        """Return the model's input; only the first chunk calls this."""

    def loss(self, y: Tensor, microbatch: int) -> Tensor:
        """Return the scalar that backward starts from; only the last chunk calls this. A forward pass ignores it."""


class Stage:
    """Forward and backward of one chunk of the model.

    Args:
        chunk: x -> y, recorded by autograd.
        batch: the micro-batches.
        is_first, is_last: whether the chunk begins or ends the model.
        recompute: keep only the input between forward and backward; backward computes chunk and loss once more.
        apart: applied to every tensor that leaves the stage; it must copy one that lies in a receive slot, which is
            soon written again (a stage that only makes views returns such a tensor). Default: no copy.
        gives_gradient: whether the stage before it needs the gradient of its input: nothing before is trained without.

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
        gives_gradient: bool = True,
    ) -> None:
        self._gives_gradient = gives_gradient and not is_first
        self._chunk, self._batch = chunk, batch
        self._is_first, self._is_last = is_first, is_last
        self._recompute, self._apart = recompute, apart
        # What was decided in the first forward, for the second.
        self._again: dict[int, AbstractContextManager[None]] = {}
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        # Where backward enters the graph; None if nothing in the chunk needs a gradient, or with recompute.
        self._ends: dict[int, Tensor | GradientEdge | None] = {}
        self._output_grads: dict[int, Tensor] = {}
        self._input_grads: dict[int, Tensor] = {}

    def begin(self, microbatch: int) -> None:
        """Note which micro-batch comes next, before its weight half, which is computed outside this class."""
        self._batch.begin(microbatch)

    def receive_input(self, microbatch: int, x: Tensor) -> None:
        """Take the upstream stage's output; it must stay unchanged until this micro-batch's backward."""
        self._inputs[microbatch] = x

    def receive_output_grad(self, microbatch: int, dy: Tensor) -> None:
        """Take the downstream stage's gradient; it must stay unchanged until this micro-batch's backward."""
        self._output_grads[microbatch] = dy

    def take_output(self, microbatch: int) -> Tensor:
        """Return the output for the downstream stage, detached; it can be taken once."""
        return self._outputs.pop(microbatch)

    def take_input_grad(self, microbatch: int) -> Tensor:
        """Return the input's gradient for the upstream stage; it can be taken once."""
        return self._input_grads.pop(microbatch)

    def forward(self, microbatch: int) -> None:
        """Run F; keep the graph for backward, or with `recompute` only the input."""
        self._batch.begin(microbatch)
        if self._recompute:
            first, self._again[microbatch] = same_choices()
            with first, torch.no_grad():
                self._run(microbatch)
            self._ends[microbatch] = None
        else:
            self._ends[microbatch] = self._end_of(self._run(microbatch))

    def backward(self, microbatch: int) -> None:
        """Run B, or I if the sinks defer weight gradients, and forget the micro-batch."""
        self._batch.begin(microbatch)
        # Where backward enters, and the gradient it starts from; with recompute, forward runs again first.
        end, dy = self._ends.pop(microbatch), self._output_grads.pop(microbatch, None)
        if self._recompute:
            with self._again.pop(microbatch):
                end = self._end_of(self._run(microbatch))
        self._outputs.pop(microbatch, None)
        if isinstance(end, GradientEdge):
            torch.autograd.backward([end], [dy])
        elif end is not None:
            # If the loss needs no gradient, the user made a mistake, and autograd's error names it.
            torch.autograd.backward(end)
        # The input's gradient waits to be sent upstream.
        x = self._inputs.pop(microbatch, None)
        if x is not None and self._gives_gradient:
            assert x.grad is not None, f"micro-batch {microbatch}: backward gave no gradient to the stage's input"
            # Clear x.grad: a weight half may keep x for longer, and must not keep its gradient too.
            self._input_grads[microbatch], x.grad = self._apart(x.grad), None

    @torch.no_grad()
    def forward_only(self, microbatch: int) -> None:
        """Run F without recording for backward; the output waits to be sent."""
        self._batch.begin(microbatch)
        x = self._batch.tokens(microbatch) if self._is_first else self._inputs.pop(microbatch)
        y = self._chunk(x)
        if self._is_last:
            self._batch.loss(y, microbatch)
        else:
            self._outputs[microbatch] = self._apart(y)

    def _run(self, microbatch: int) -> Tensor:
        """Compute a micro-batch's output, which waits to be sent, or on the last stage its loss."""
        if self._is_first:
            y = self._chunk(self._batch.tokens(microbatch))
        else:
            # A leaf that shares the received memory and collects the gradient, if anybody needs one.
            x = self._inputs[microbatch].detach().requires_grad_(self._gives_gradient)
            self._inputs[microbatch] = x
            y = self._chunk(x)
        if self._is_last:
            return self._batch.loss(y, microbatch)
        self._outputs[microbatch] = self._apart(y.detach())
        return y

    def _end_of(self, y: Tensor) -> Tensor | GradientEdge | None:
        if self._is_last:
            return y
        # A first stage without trained parameters has nothing to differentiate.
        return get_gradient_edge(y) if y.requires_grad else None


class RankPipeline:
    """One rank's stages and transfers, driven by the actions of one plan.

    Args:
        plan: the verified plan.
        rank: this rank's place in the pipeline.
        stages: this rank's chunks, by number.
        group: the pipeline's ranks, in order.
        device: where tensors live.
        mailbox: carries the messages; None for the process group.
        halves: keeps contributions to weight gradients from I to W; None if the plan has neither.
        on_receive: called with each received tensor.
        backward: the same ranks again, to carry gradients, as Transfers has it.

    Attributes:
        most_live: the most (chunk, micro-batch) pairs that were held for backward at once: from F to B, or to W.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        stages: Mapping[int, Stage],
        group: ProcessGroup,
        device: torch.device,
        mailbox: Mailbox | None = None,
        *,
        halves: WeightHalves | None = None,
        on_receive: Callable[[Tensor], None] = lambda tensor: None,
        backward: ProcessGroup | None = None,
    ) -> None:
        self.stages = stages
        self._plan, self._training, self._halves = plan, plan.training, halves
        self._live: set[tuple[int, int]] = set()
        self.most_live = 0
        # Not methods of this object: in a circle with it, received tensors would stay until a garbage collection.
        ends = functools.partial(_fetch, stages), functools.partial(_deliver, stages, on_receive)
        self._transfers = Transfers(plan, rank, group, *ends, device, mailbox, backward)

    def handlers(self) -> dict[Kind, Handler]:
        """Return the handlers of compute actions and transfers; a WAIT's handler calls `wait_for` per transfer."""
        handlers: dict[Kind, Handler] = {Kind.F: self.forward}
        if self._training:
            handlers[Kind.B] = self.backward
        if self._training and self._halves is not None:
            handlers |= {Kind.I: self.input_half, Kind.W: self.weight_half}
        return handlers | dict.fromkeys(TRANSFERS, self._transfers.post)

    def forward(self, action: Action) -> None:
        """Run F; if the next chunk is this rank's too, pass the output to it."""
        chunk, microbatch = action.piece
        stage = self.stages[chunk]
        if self._training and self._plan.chunks[chunk].has_backward:
            self._live.add(action.piece)
            self.most_live = max(self.most_live, len(self._live))
            stage.forward(microbatch)
        else:
            stage.forward_only(microbatch)
        if chunk + 1 in self.stages:
            self.stages[chunk + 1].receive_input(microbatch, stage.take_output(microbatch))

    def backward(self, action: Action) -> None:
        """Run B; if the previous chunk is this rank's too, pass the input's gradient to it."""
        self._input_gradient(action)
        self._live.remove(action.piece)

    def _input_gradient(self, action: Action) -> None:
        chunk, microbatch = action.piece
        stage = self.stages[chunk]
        stage.backward(microbatch)
        if chunk - 1 in self.stages and self._plan.gives_gradient(chunk):
            self.stages[chunk - 1].receive_output_grad(microbatch, stage.take_input_grad(microbatch))

    def input_half(self, action: Action) -> None:
        """Run I: the contributions to weight gradients are kept for W."""
        assert self._halves is not None, "a plan with I and W needs somewhere to keep weight halves"
        with self._halves.of(action.piece):
            self._input_gradient(action)

    def weight_half(self, action: Action) -> None:
        """Run W: add the contributions that I has kept."""
        assert self._halves is not None, "a plan with I and W needs somewhere to keep weight halves"
        chunk, microbatch = action.piece
        self.stages[chunk].begin(microbatch)
        self._halves.run(action.piece)
        self._live.remove(action.piece)

    def wait_for(self, transfer: Action) -> None:
        """Wait for one transfer."""
        self._transfers.wait(transfer)

    def is_complete(self, transfer: Action) -> bool:
        """Return whether a posted transfer is complete; for a trace."""
        return self._transfers.is_complete(transfer)

    @property
    def copies(self) -> bool:
        """Whether posting and waiting copy the data themselves: see `Transfers.copies`."""
        return self._transfers.copies

    def wait(self, action: Action) -> None:
        """Handle a WAIT that lists transfers only."""
        for transfer in action.subs:
            self._transfers.wait(transfer)


def _fetch(stages: Mapping[int, Stage], action: Action) -> Tensor:
    stage, microbatch = stages[action.piece[0]], action.piece[1]
    take = stage.take_output if action.kind is Kind.SEND_F else stage.take_input_grad
    return take(microbatch)


def _deliver(stages: Mapping[int, Stage], on_receive: Callable[[Tensor], None], action: Action, tensor: Tensor) -> None:
    stage, microbatch = stages[action.piece[0]], action.piece[1]
    on_receive(tensor)
    receive = stage.receive_input if action.kind is Kind.RECV_F else stage.receive_output_grad
    receive(microbatch, tensor)
