"""A pipeline of any nn.Sequential: the engine's plan and executor run the user's modules.

Generators, lowering, verifier and executor are those of the transformer's step; only the handlers differ. The plan's
actions CLIP and STEP do nothing here: the user's optimizer clips and updates after the step.

What is deliberately elsewhere: checks before anything runs and the weights of micro-batches in the loss
(pipeline_checks.py), what the modules cost and where they are cut (cut.py), values of modules on the meta device
(model/meta_modules.py), data parallelism over several pipelines (DataParallel on `stage`: see `step`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from tpkernels.exchange.communicator import Communicator

from tpengine.distributed.agreement import broadcast_json, broadcast_model
from tpengine.layers.gradient_sink import DeferringSink, WeightHalves
from tpengine.layers.replicated import carry_over, check_beside_parallel_layers
from tpengine.model.meta_modules import Init, fill_modules, is_on_meta, materialise
from tpengine.modules.cut import (
    ModuleProfile,
    check_cut,
    children_of,
    chunks_of,
    cut_by_cost,
    cut_by_hand,
    profile_on_rank_0,
    slowest_over_world,
)
from tpengine.modules.pipeline_checks import (
    Count,
    Loss,
    PipelineLoss,
    StageModules,
    autocast_of,
    check_arguments,
    check_autocast,
    check_same_arguments,
    check_same_plan,
    ranks_where,
    schedule_of_all,
    sink_of,
)
from tpengine.pipeline.executor import Executor, Handler, Trace
from tpengine.pipeline.preload import connect, must_preload
from tpengine.pipeline.stage import Batch, RankPipeline, Stage
from tpengine.pipeline.transfers import open_mailbox
from tpengine.plan import Kind, Plan, Schedule, forward_only, lower, verify

# How long a message waits for a live rank, as over gloo: another rank may be busy with the caller's own work.
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
            overwritten with those of the group's rank 0. Afterwards each rank needs only its stage: delete the model to
            free the rest. Of a model on the meta device (built under `torch.device("meta")`) only this rank's stage is
            given memory.
        sample: input of one micro-batch, on the device to compute on; every micro-batch must have its shape and dtype.
        loss: (output, target) of a micro-batch -> scalar, a mean over the micro-batch; micro-batches weigh the same.
            With `count`: a sum over the micro-batch's valid targets, or (sum, their number); that number must then be
            the one that `count` returns.
        num_micro_batches: micro-batches that a step's batch is split into.
        group: the pipeline's ranks, in stage order; default all.
        schedule: a name in tpengine.plan.SCHEDULES, or the path of a text file with one.
        chunks_per_rank: parts that a rank holds with schedule interleaved; the other schedules fix it.
        cut: modules of each part, in model order; default a cut that balances the modules' counted cost (flops and
            sizes: see modules/cut.py), the same on every replica and every start. With "measured" the cost is
            the time that each module takes on the sample, measured once on this machine. Then all ranks of the default
            group must construct their pipelines together, and get one cut: for each module the slowest pipeline
            counts. If the model cannot run in one pipeline, all of them raise.
        init: gives modules on the meta device their values. A function: init(module, index) fills all parameters and
            buffers of model[index]. It is called on the rank that holds the module, after torch.manual_seed of a number
            that follows from torch.initial_seed() of the group's rank 0 and the index. So the values are the same for
            every cut and number of stages. Or the whole model's state dict; if it loads lazily, only the tensors of
            this stage are read.
        count: target of a micro-batch -> number of its valid targets, an int or a tensor. The loss is divided by the
            number over all micro-batches and `replicas`, which is known before the first forward pass.
        replicas: with `count`, the ranks that hold the same stage in all pipelines: those of the DataParallel.
        trace: records what the executor runs.

    Attributes:
        stage: this rank's modules, under their names in `model`: a state dict of all stages is that of the model.
        layers: half-open range of modules of each part of the model; the schedule says which rank holds a part.
        plan: the verified plan of a step; this rank runs `plan.actions[rank]`.

    Raises:
        ValueError: on every rank alike: ranks differ in model or arguments, `replicas` without `count`, a forward other
            than nn.Sequential's, fewer modules than parts, an unknown schedule, a parameter or buffer shared between
            ranks, a part other than the first that passes no gradient back, a schedule that splits backward over
            modules that cannot, modules on the meta device that get no values, a parameter beside tensor-parallel
            layers whose gradient nothing sums (see layers.replicate).
        RuntimeError: there is no process group, or ranks differ in plan.

    BatchNorm sees micro-batches, and keeps their statistics, not the batch's. Dropout draws from each rank's own
    generator. A schedule that splits backward into halves (zb-h1, zbv) needs matrices whose gradients go to a sink, as
    those of tpengine.layers do: of any other module autograd computes both halves at once. Modules without a matrix may
    be any, nn.LayerNorm too: all of their gradient is computed in the input half. Use autocast either around
    construction and all steps, or inside the modules: it decides the dtype of what stages exchange.
    Cost: construction runs the sample once through the model on rank 0, forward and backward. Modules on the meta
    device run there. One that cannot, because it exchanges with other ranks or reads values, is copied into rank 0's
    memory, and freed before the next is copied. Memory: inputs and outputs of as many micro-batches as the schedule
    keeps alive.
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
        chunks_per_rank: int = 2,
        cut: Sequence[int] | Literal["measured"] | None = None,
        init: Init | None = None,
        count: Count | None = None,
        replicas: Communicator | None = None,
        trace: Trace | None = None,
    ) -> None:
        ranks = group if group is not None else dist.group.WORLD
        if ranks is None:
            raise RuntimeError("a pipeline needs a process group: there is none: call init_process_group first")
        self._group: ProcessGroup = ranks
        self._comm = Communicator(self._group)
        self._num, self._trace, self._replicas = num_micro_batches, trace, replicas
        self._sample_shape, self._dtype = sample.shape, sample.dtype
        # A sample on the meta device is refused below, on all ranks alike.
        self._device = torch.device("cpu") if sample.is_meta else sample.device
        self._autocast = autocast_of(self._device)
        # Agree: all ranks have the same model, arguments and schedule, and these are legal.
        given = model, sample, num_micro_batches, schedule, chunks_per_rank, cut, init, count, replicas
        check_same_arguments(*given, self._device, self._comm)
        check_arguments(model, sample, num_micro_batches, cut, init, count, replicas)
        check_beside_parallel_layers(model)
        made = schedule_of_all(schedule, model, num_micro_batches, chunks_per_rank, self._device, self._comm)
        broadcast_model(model, self._comm)
        # Cut: which modules each rank holds, and the plan of a step.
        profiles = self._cut(model, sample, cut, made.ranks)
        self.plan = self._lowered(made, training=True)
        check_same_plan(self.plan, self._device, self._comm)
        # Build this rank's stage.
        self._build_stage(model, init, profiles)
        self._halves = WeightHalves()
        if made.splits_backward:
            _defer_weight_gradients(self.stage, self._halves)
        self._received: set[int] = set()
        num_replicas = 1 if replicas is None else replicas.size
        self._loss = PipelineLoss(loss, count, self._num, num_replicas, profiles[-1].output, self._device)
        self._mailbox = open_mailbox((self.plan, self._forward_plan), self._group, self._device, _MESSAGE_SECONDS)
        if must_preload(self._group):
            connect(self.plan, self._comm.rank, self._group, self._device)

    def _cut(
        self,
        model: nn.Sequential,
        sample: Tensor,
        cut: Sequence[int] | Literal["measured"] | None,
        ranks: Sequence[int],
    ) -> list[ModuleProfile]:
        """Decide which modules each part holds, and what parts exchange; return the modules' profiles."""
        profiles, problem = [], ""
        try:
            profiles = profile_on_rank_0(model, sample, self._comm, measured=cut == "measured")
        except ValueError as error:
            if cut != "measured":
                raise
            # Raised below, on all ranks: the other pipelines wait for this one's times.
            problem = str(error)
        costs = [module.cost for module in profiles]
        if cut == "measured":
            costs = slowest_over_world(costs, problem, Communicator(dist.group.WORLD), self._device)
        if cut is None or cut == "measured":
            self.layers = cut_by_cost(costs, ranks)
        else:
            self.layers = cut_by_hand(cut, len(model), len(ranks))
        check_cut(model, self.layers, ranks, profiles)
        self._chunks = chunks_of(self.layers, ranks, profiles)
        return profiles

    def _build_stage(self, model: nn.Sequential, init: Init | None, profiles: Sequence[ModuleProfile]) -> None:
        """Make this rank's stage of its modules; give those on the meta device memory and values."""
        self._held = self.plan.chunks_of(self._comm.rank)
        children = children_of(model)
        mine = [child for chunk in self._held for child in children[slice(*self.layers[chunk])]]
        self._modules_of = {chunk: [m for _, m in children[slice(*self.layers[chunk])]] for chunk in self._held}
        self.stage = StageModules(OrderedDict(mine), self._comm.size)
        self.stage.training = model.training
        if init is not None:
            self._fill_stage(model, init)
        # A chunk that works in place gets a copy of its input: the received tensor is the leaf that gets the gradient.
        self._copies_input = {
            chunk: chunk > 0 and any(module.in_place for module in profiles[slice(*self.layers[chunk])])
            for chunk in self._held
        }

    @property
    def is_first(self) -> bool:
        """Whether this rank reads the inputs."""
        return 0 in self._held

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return len(self.layers) - 1 in self._held

    def step(self, inputs: Tensor | None, targets: Tensor | None) -> float:
        """Run forward and backward of a batch; add gradients to `.grad` of the stage's parameters.

            gradient = d/dw of the mean over micro-batches of loss(model(inputs), targets)
            with `count`: d/dw of R / N * sum over micro-batches of it, for N valid targets in R replicas

        With several pipelines, wrap `stage` in a DataParallel over the ranks that hold the same stage. Its mean over
        the replicas is then the gradient of the whole batch:

            with replicas.no_sync():  # micro-batches add up here
                loss = pipe.step(inputs, targets)
            replicas.finish()

        Before the first step the loss is also called once on outputs of zeros, to check what it returns.

        Args:
            inputs: [num_micro_batches * n, ...] for a sample of [n, ...]; needed where `is_first` only.
            targets: [num_micro_batches * n, ...]; needed where `is_last` only.

        Returns:
            The loss of the pipeline's batch, equal on all its ranks: the mean over micro-batches, or with `count` the
            term above. The mean of this value over the replicas is the loss of the whole batch.

        Raises:
            ValueError: on every rank, if on one of them: the batch does not have num_micro_batches times the sample's
                rows; autocast is not that of construction; no target is valid; the loss does not return what it should.
                After the step, on every rank of every replica: the loss and `count` found different numbers of valid
                targets. Do not use what that step has added to `.grad`.
        """
        # Check the batch on all ranks, run the plan, sum the loss over the pipeline.
        self._run(self.plan, _Trained(*self._taken(inputs, targets, training=True), self._loss))
        sums = self._comm.all_reduce_(self._loss.sums)
        if self._loss.counts and self._replicas is not None:
            # If one pipeline raises, all must: the others would wait for its gradients.
            self._replicas.all_reduce_(sums[1:])
        return self._loss.total(sums)

    @torch.no_grad()
    def forward(self, inputs: Tensor | None) -> Tensor | None:
        """Run a batch forward, without recording for backward.

        Args:
            inputs: as in `step`.

        Returns:
            The outputs of the whole batch on the rank where `is_last`; None on the others.

        Raises:
            ValueError: as `step`.
        """
        mine, _ = self._taken(inputs, None, training=False)
        batch = _Mapped(mine, self.apart)
        self._run(self._forward_plan, batch)
        return torch.cat(batch.outputs) if self.is_last else None

    def _run(self, plan: Plan, batch: Batch) -> None:
        rank = self._comm.rank
        self._received.clear()
        pipeline = RankPipeline(
            plan,
            rank,
            self._stages(batch),
            self._group,
            self._device,
            self._mailbox,
            halves=self._halves,
            on_receive=lambda tensor: self._received.add(tensor.untyped_storage().data_ptr()),
        )
        handlers: dict[Kind, Handler] = {
            **pipeline.handlers(),
            Kind.WAIT: pipeline.wait,
            # The user's optimizer clips and steps, after `step` has returned.
            Kind.CLIP: lambda _: None,
            Kind.STEP: lambda _: None,
        }
        Executor(dist.get_rank(), handlers, self._trace).run(plan.actions[rank])

    def _stages(self, batch: Batch) -> dict[int, Stage]:
        last = len(self.layers) - 1
        return {
            chunk: Stage(
                partial(self._compute, chunk=chunk),
                batch,
                is_first=chunk == 0,
                is_last=chunk == last,
                apart=self.apart,
            )
            for chunk in self._held
        }

    def _compute(self, x: Tensor, chunk: int) -> Tensor:
        if self._copies_input[chunk]:
            x = x.clone()
        for module in self._modules_of[chunk]:
            x = module(x)
        return x

    def apart(self, tensor: Tensor) -> Tensor:
        """Copy a tensor that lies in a receive slot, which is reused; a stage of views returns such a tensor."""
        return tensor.clone() if tensor.untyped_storage().data_ptr() in self._received else tensor

    def _taken(
        self, inputs: Tensor | None, targets: Tensor | None, *, training: bool
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Cut the batch into micro-batches; if one rank refuses its part, all raise, before any waits for another."""
        problem: ValueError | None = None
        num_targets = 0
        mine: Sequence[Tensor] = ()
        wanted: Sequence[Tensor] = ()
        try:
            check_autocast(self._autocast, self._device)
            mine = self._split("inputs", inputs, self.is_first)
            wanted = self._split("targets", targets, self.is_last and training)
            if self.is_last and training:
                num_targets = self._loss.prepare(wanted)
        except ValueError as error:
            problem = error
        report = torch.tensor([[problem is not None, num_targets]], dtype=torch.int64, device=self._device)
        said = self._comm.all_gather(report).tolist()
        refusing = [rank for rank, (refuses, _) in enumerate(said) if refuses]
        num_targets = sum(number for _, number in said)
        elsewhere = 0
        if training and self._loss.counts and self._replicas is not None:
            told = torch.tensor([len(refusing), num_targets], dtype=torch.int64, device=self._device)
            elsewhere, num_targets = self._replicas.all_reduce_(told).tolist()
        if problem is not None:
            raise problem
        if refusing:
            raise ValueError(f"every rank's batch must fit: ranks {refusing} refused theirs: see their message")
        if elsewhere:
            raise ValueError("every replica's batch must fit: another replica refused its own: see its message")
        if training:
            self._loss.begin(num_targets)
        return mine, wanted

    def _split(self, name: str, batch: Tensor | None, needed: bool) -> Sequence[Tensor]:
        """Check a batch and cut it into micro-batches; ranks that do not need it may pass None."""
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

    def _fill_stage(self, model: nn.Sequential, init: Init) -> None:
        """Give memory and values to this rank's modules on the meta device."""
        seed = 0 if isinstance(init, Mapping) else broadcast_json(torch.initial_seed(), self._group)
        places: dict[nn.Module, tuple[int, str]] = {}
        for index, (name, module) in enumerate(children_of(model)):
            if any(index in range(*self.layers[chunk]) for chunk in self._held) and is_on_meta(module):
                places.setdefault(module, (index, name))
        made: dict[Tensor, Tensor] = {}
        problem: Exception | None = None
        try:
            materialise(self.stage, self._device, made=made)
            modules = [(index, name, module) for module, (index, name) in places.items()]
            fill_modules(modules, init, seed, self._device, made)
        except Exception as error:
            problem = error
        refusing = ranks_where(problem is not None, self._device, self._comm)
        if problem is not None:
            raise ValueError(
                str(problem) if isinstance(problem, ValueError) else f"init fails: {problem!r}"
            ) from problem
        if refusing:
            raise ValueError(
                f"every rank must be able to fill its modules: ranks {refusing} could not: see their message"
            )
        carry_over(self.stage, made)

    @cached_property
    def _forward_plan(self) -> Plan:
        ranks = tuple(chunk.rank for chunk in self._chunks)
        return self._lowered(forward_only(ranks, self._num), training=False)

    def _lowered(self, schedule: Schedule, *, training: bool) -> Plan:
        plan = lower(
            schedule,
            self._chunks,
            buckets=(),
            ties=(),
            num_microbatches=self._num,
            num_layers=self.layers[-1][1],
            training=training,
        )
        verify(plan)
        return plan


class _Given:
    """The micro-batches of a batch. Beginning one needs no action: nothing depends on its number."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._inputs = inputs

    def begin(self, microbatch: int) -> None:
        pass

    def tokens(self, microbatch: int) -> Tensor:
        return self._inputs[microbatch]


class _Trained(_Given):
    """The batch of a training step: its pass ends in the loss."""

    def __init__(self, inputs: Sequence[Tensor], targets: Sequence[Tensor], loss: PipelineLoss) -> None:
        super().__init__(inputs)
        self._targets, self._loss = targets, loss

    def loss(self, y: Tensor, microbatch: int) -> Tensor:
        return self._loss.weighted(y, self._targets[microbatch], microbatch)


class _Mapped(_Given):
    """The batch of a forward pass: it keeps the outputs."""

    def __init__(self, inputs: Sequence[Tensor], apart: Callable[[Tensor], Tensor]) -> None:
        super().__init__(inputs)
        self._apart = apart
        self.outputs: list[Tensor] = []

    def loss(self, y: Tensor, microbatch: int) -> Tensor:
        self.outputs.append(self._apart(y))
        return y


def _defer_weight_gradients(stage: nn.Sequential, halves: WeightHalves) -> None:
    for module in stage.modules():
        sink = sink_of(module)
        if isinstance(sink, DeferringSink):
            # An earlier pipeline was made of the same modules.
            sink.halves = halves
        elif sink is not None:
            module.sink = DeferringSink(sink, halves)  # type: ignore[assignment]
