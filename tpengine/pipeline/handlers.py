"""The chunks of one pipeline rank at run time: handlers for a plan's compute actions and transfers.

Between chunks of different ranks a tensor is a transfer of the plan. Between neighbouring chunks of one rank it is
passed on directly, without an action. The trainer, evaluation and `Pipeline` all run on these handlers and add their
own for the other actions (gradient buckets, clipping, the update).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from tpkernels.exchange.mailbox import Mailbox

from tpengine.layers.gradient_sink import WeightHalves
from tpengine.pipeline.executor import Handler
from tpengine.pipeline.stage import Stage
from tpengine.pipeline.transfers import Transfers
from tpengine.plan import Action, Kind, Plan
from tpengine.plan.actions import TRANSFERS


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
    ) -> None:
        self.stages = stages
        self._training, self._halves = plan.training, halves
        self._on_receive = on_receive
        self._live: set[tuple[int, int]] = set()
        self.most_live = 0
        self._transfers = Transfers(plan, rank, group, self._fetch, self._deliver, device, mailbox)

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
        if self._training:
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
        if chunk - 1 in self.stages:
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

    def _fetch(self, action: Action) -> Tensor:
        chunk, microbatch = action.piece
        stage = self.stages[chunk]
        take = stage.take_output if action.kind is Kind.SEND_F else stage.take_input_grad
        return take(microbatch)

    def _deliver(self, action: Action, tensor: Tensor) -> None:
        chunk, microbatch = action.piece
        stage = self.stages[chunk]
        self._on_receive(tensor)
        receive = stage.receive_input if action.kind is Kind.RECV_F else stage.receive_output_grad
        receive(microbatch, tensor)
