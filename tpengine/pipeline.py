"""A pipeline out of any nn.Sequential: the engine's plan and executor over somebody else's modules.

The same generators, lowering, verifier and executor as the transformer's step; only the handlers differ. What the plan
calls CLIP and STEP belongs to the user's optimizer, outside.

What is deliberately elsewhere: where the modules are cut (sequential_cut), data parallelism over several pipelines
(data_parallel.DataParallel on `stage`: see `step`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tpengine.collectives import Communicator
from tpengine.execute import Executor, Handler, Trace
from tpengine.plan import SCHEDULES, Action, Kind, Plan, forward_only, lower, verify
from tpengine.same_model import broadcast_model, check_same, describe_model, differing_members
from tpengine.sequential_cut import check_cut, children_of, chunks_of, cut_by_cost, cut_by_hand, profile_on_rank_0
from tpengine.stage import Stage
from tpengine.transfers import Transfers, open_mailbox

Loss = Callable[[Tensor, Tensor], Tensor]

# How long a message waits for a rank that lives, as over gloo: another rank may be busy with the caller's own work.
_MESSAGE_SECONDS = 1800.0


class Pipeline:
    """One rank of a pipeline over an nn.Sequential.

        pipe = Pipeline(model, sample, loss, num_micro_batches=8)
        optimizer = torch.optim.AdamW(pipe.stage.parameters())
        loss = pipe.step(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()

    Args:
        model: the whole model, the same on every rank, on the device to compute on. Its parameters and buffers are
            overwritten with those of the group's rank 0. Each rank goes on with its stage; drop the model to free the
            rest.
        sample: input of one micro-batch; every micro-batch must have its shape and dtype.
        loss: (output, target) of a micro-batch -> scalar, a mean over the micro-batch.
        num_micro_batches: how many a step's batch is split into.
        group: the pipeline's ranks, in stage order; default all.
        schedule: a name in tpengine.plan.SCHEDULES.
        cut: modules of each stage; by default the cut follows the modules' measured cost, forward and backward.
        trace: records what the executor runs.

    Attributes:
        stage: this rank's modules, under their names in `model`: a state dict of all stages is that of the model.
        layers: half-open range of modules of each stage.
        plan: the verified plan of a step; what runs is `plan.actions[rank]`.

    Raises:
        ValueError: on every rank alike: ranks differ in model or arguments, a forward other than nn.Sequential's, fewer
            modules than ranks, an unknown schedule, a parameter or buffer shared between stages, a stage other than
            the first that passes no gradient back.
        RuntimeError: there is no process group, or ranks differ in plan.

    BatchNorm sees micro-batches, and keeps their statistics, not the batch's. Dropout draws from each rank's own
    generator.
    Cost: construction runs the sample a few times through the model on rank 0. Memory: inputs and outputs of as many
    micro-batches as the schedule keeps alive.
    """

    def __init__(
        self,
        model: nn.Sequential,
        sample: Tensor,
        loss: Loss,
        *,
        num_micro_batches: int,
        group: ProcessGroup | None = None,
        schedule: str = "1f1b",
        cut: Sequence[int] | None = None,
        trace: Trace | None = None,
    ) -> None:
        ranks = group if group is not None else dist.group.WORLD
        if ranks is None:
            raise RuntimeError("a pipeline needs a process group: there is none: call init_process_group first")
        self._group: ProcessGroup = ranks
        self._comm = Communicator(self._group)
        self._loss, self._num, self._trace = loss, num_micro_batches, trace
        self._sample_shape, self._dtype, self._device = sample.shape, sample.dtype, sample.device
        arguments = [
            f"num_micro_batches {num_micro_batches}",
            f"schedule {schedule}",
            f"cut {cut and list(cut)}",
            f"sample {list(sample.shape)} {sample.dtype}",
        ]
        modules = [type(model).__qualname__, *map(str, model._modules.values())]
        check_same([*describe_model(model), *modules, *arguments], model, self._comm)
        _check_arguments(model, sample, self._comm.size, schedule, num_micro_batches)
        broadcast_model(model, self._comm)
        profiles = profile_on_rank_0(model, sample, self._comm)
        if cut is None:
            self.layers = cut_by_cost([module.seconds for module in profiles], self._comm.size)
        else:
            self.layers = cut_by_hand(cut, len(model), self._comm.size)
        check_cut(model, self.layers, profiles)
        self._chunks = chunks_of(self.layers, profiles)
        self.plan = self._lowered(schedule, training=True)
        _check_same_plan(self.plan, self._device, self._comm)

        first, last = self.layers[self._comm.rank]
        self.stage = nn.Sequential(OrderedDict(children_of(model)[first:last]))
        self.stage.training = model.training
        # A module that works in place must not do so on the received tensor, which collects the gradient.
        self._copies_input = first > 0 and any(module.in_place for module in profiles[first:last])
        self._received: set[int] = set()
        self._inputs: Sequence[Tensor] = ()
        self._targets: Sequence[Tensor] = ()
        self._outputs: list[Tensor] = []
        self._total = torch.zeros((), dtype=torch.float64, device=self._device)
        self._mailbox = open_mailbox(self.plan, self._group, self._device, _MESSAGE_SECONDS)

    @property
    def is_first(self) -> bool:
        """Whether this rank reads the inputs."""
        return self._comm.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self._comm.rank == self._comm.size - 1

    def step(self, inputs: Tensor | None, targets: Tensor | None) -> float:
        """Run forward and backward of a batch; gradients are added to `.grad` of the stage's parameters.

            gradient = d/dw of the mean over micro-batches of loss(model(inputs), targets)

        With several pipelines side by side, all of one `cut`, make a DataParallel of `stage` over the ranks that hold
        the same one, and:

            with replicas.no_sync():  # micro-batches add up here
                loss = pipe.step(inputs, targets)
            replicas.finish()

        Args:
            inputs: [num_micro_batches * n, ...] for a sample of [n, ...]; needed on the first rank only.
            targets: [num_micro_batches * n, ...]; needed on the last rank only.

        Returns:
            The mean loss of the batch, equal on all ranks.

        Raises:
            ValueError: on every rank: a batch that is no whole number of such micro-batches, on any of them.
        """
        self._take(inputs, targets, training=True)
        self._total.zero_()
        self._run(self.plan, training=True)
        return float(self._comm.all_reduce_(self._total))

    @torch.no_grad()
    def forward(self, inputs: Tensor | None) -> Tensor | None:
        """Run a batch forward, without history.

        Args:
            inputs: as in `step`.

        Returns:
            On the last rank the outputs of the whole batch, elsewhere None.

        Raises:
            ValueError: as `step`.
        """
        self._take(inputs, None, training=False)
        self._outputs = []
        self._run(self._forward_plan, training=False)
        return torch.cat(self._outputs) if self.is_last else None

    def _run(self, plan: Plan, *, training: bool) -> None:
        rank = self._comm.rank
        self._received.clear()
        stage = Stage(
            self._compute,
            (lambda mb: self._inputs[mb]) if self.is_first else None,
            (self._weighted_loss if training else self._keep) if self.is_last else None,
        )

        def fetch(action: Action) -> Tensor:
            if action.kind is Kind.SEND_B:
                return self._apart(stage.take_input_grad(action.piece[1]))
            return self._apart(stage.output(action.piece[1]) if training else stage.take_output(action.piece[1]))

        def deliver(action: Action, tensor: Tensor) -> None:
            self._received.add(tensor.untyped_storage().data_ptr())
            receive = stage.receive_input if action.kind is Kind.RECV_F else stage.receive_output_grad
            receive(action.piece[1], tensor)

        transfers = Transfers(plan, rank, self._group, fetch, deliver, self._device, self._mailbox)

        def wait(action: Action) -> None:
            for transfer in action.subs:
                transfers.wait(transfer)

        run_forward = stage.forward if training else stage.forward_only
        handlers: dict[Kind, Handler] = {
            Kind.F: lambda action: run_forward(action.piece[1]),
            Kind.B: lambda action: stage.backward(action.piece[1]),
            Kind.WAIT: wait,
            # The user's optimizer clips and steps, after `step` has returned.
            Kind.CLIP: lambda _: None,
            Kind.STEP: lambda _: None,
        }
        handlers |= dict.fromkeys((Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B, Kind.EXCHANGE), transfers.post)
        Executor(dist.get_rank(), handlers, self._trace).run(plan.actions[rank])

    def _compute(self, x: Tensor) -> Tensor:
        y: Tensor = self.stage(x.clone() if self._copies_input else x)
        return y

    def _apart(self, tensor: Tensor) -> Tensor:
        """Copy what lies in a receive slot: what a stage of views makes does, and the slot is soon written again."""
        return tensor.clone() if tensor.untyped_storage().data_ptr() in self._received else tensor

    def _weighted_loss(self, output: Tensor, microbatch: int) -> Tensor:
        loss = self._loss(output, self._targets[microbatch]) / self._num
        if loss.dim() != 0:
            raise ValueError(f"loss must return a scalar: got shape {list(loss.shape)}: return its mean")
        self._total += loss.detach()
        return loss

    def _keep(self, output: Tensor, _: int) -> Tensor:
        self._outputs.append(self._apart(output))
        return output

    def _take(self, inputs: Tensor | None, targets: Tensor | None, *, training: bool) -> None:
        """Cut the batch into micro-batches; a rank that refuses its own stops all, before any waits for another."""
        problem: ValueError | None = None
        try:
            self._inputs = self._split("inputs", inputs, self.is_first)
            self._targets = self._split("targets", targets, self.is_last and training)
        except ValueError as error:
            problem = error
        refused = torch.tensor([problem is not None], dtype=torch.uint8, device=self._device)
        refusing = [rank for rank, refuses in enumerate(self._comm.all_gather(refused).tolist()) if refuses]
        if problem is not None:
            raise problem
        if refusing:
            raise ValueError(f"every rank's batch must fit: ranks {refusing} refused theirs: see their message")

    def _split(self, name: str, batch: Tensor | None, needed: bool) -> Sequence[Tensor]:
        """Cut a batch into micro-batches, after checking it; ranks that do not need it may pass None."""
        if batch is None and not needed:
            return ()
        rows = self._sample_shape[0] * self._num
        if batch is None or batch.shape[:1] != (rows,):
            raise ValueError(
                f"{name} must hold num_micro_batches times the sample's rows: {self._num} * {self._sample_shape[0]} = "
                f"{rows}, got {'None' if batch is None else list(batch.shape)}: pass {rows} rows"
            )
        if name == "inputs" and (batch.shape[1:], batch.dtype) != (self._sample_shape[1:], self._dtype):
            raise ValueError(
                f"a micro-batch must have the sample's shape and dtype: {list(self._sample_shape)} {self._dtype}, got "
                f"{[self._sample_shape[0], *batch.shape[1:]]} {batch.dtype}: make another Pipeline for other shapes"
            )
        return batch.split(self._sample_shape[0])

    @cached_property
    def _forward_plan(self) -> Plan:
        return self._lowered("forward_only", training=False)

    def _lowered(self, schedule: str, *, training: bool) -> Plan:
        size = self._comm.size
        compute = SCHEDULES[schedule](size, self._num) if training else forward_only(size, self._num)
        plan = lower(
            schedule,
            compute,
            self._chunks,
            buckets=(),
            ties=(),
            num_microbatches=self._num,
            num_layers=self.layers[-1][1],
            training=training,
        )
        verify(plan)
        return plan


def _check_arguments(
    model: nn.Sequential, sample: Tensor, num_stages: int, schedule: str, num_micro_batches: int
) -> None:
    if type(model).forward is not nn.Sequential.forward:
        raise ValueError(
            f"a pipeline runs modules one after another: {type(model).__qualname__} has a forward of its own: pass an "
            "nn.Sequential of its parts"
        )
    if sample.dim() == 0 or sample.shape[0] == 0:
        raise ValueError(f"a sample must have rows: got shape {list(sample.shape)}: pass the input of a micro-batch")
    if len(model) < num_stages:
        raise ValueError(
            f"every stage needs a module: {len(model)} modules, {num_stages} ranks: use at most {len(model)} ranks, or "
            "split a module"
        )
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}: got {schedule!r}: use 1f1b")
    if num_micro_batches < 1:
        raise ValueError(f"num_micro_batches must be at least 1: got {num_micro_batches}: use {2 * num_stages}")


def _check_same_plan(plan: Plan, device: torch.device, comm: Communicator) -> None:
    """Compare the plan over the ranks, as nodes may differ in version: what was verified is what runs."""
    differing = differing_members(plan.text().encode(), device, comm)
    if differing:
        raise RuntimeError(
            f"all ranks must have the same plan: ranks {differing} differ from rank 0: start every rank with the same "
            "version"
        )
