"""Checks of a pipeline before it runs: arguments, schedules, plans and losses. Every rank refuses the same ones.

What is deliberately elsewhere: whether the parts of a cut can train (cut.py), checks of a step's batch (pipeline.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from tpkernels.exchange.communicator import Communicator

from tpengine.distributed.agreement import check_same, describe_model, differing_members
from tpengine.layers.gradient_sink import GradientSink
from tpengine.model.meta_modules import Init, is_on_meta
from tpengine.plan import Plan, Schedule, TensorSpec, make_schedule
from tpengine.plan.schedule_file import format_schedule

Loss = Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor | int]]
Count = Callable[[Tensor], Tensor | int]


class StageModules(nn.Sequential):
    """One stage of a pipeline, under the names that its modules have in the model.

    Args:
        modules: by name.
        num_ranks: of the pipeline.
    """

    def __init__(self, modules: OrderedDict[str, nn.Module], num_ranks: int) -> None:
        super().__init__(modules)
        self.num_ranks = num_ranks


class PipelineLoss:
    """The loss of a step's micro-batches.

        without `count`:  mean over micro-batches of loss(output, target)
        with `count`:     R / N * sum over micro-batches of loss(output, target), N targets in R replicas

    Args:
        loss: (output, target) of a micro-batch -> a mean; with `count` a sum, or (sum, number of valid targets).
        count: target of a micro-batch -> number of valid targets in it.
        num_micro_batches: per step.
        num_replicas: R; the gradients of the replicas are averaged afterwards.
        output: shape and dtype of the outputs.
        device: where the outputs lie.

    Attributes:
        counts: whether there is a `count`.
        sums: this rank's [loss of the step, difference between the numbers of targets that `loss` and `count` give].
    """

    def __init__(
        self,
        loss: Loss,
        count: Count | None,
        num_micro_batches: int,
        num_replicas: int,
        output: TensorSpec,
        device: torch.device,
    ) -> None:
        self._loss, self._count, self._output, self._device = loss, count, output, device
        self._num_replicas = num_replicas
        self._was_tried = False
        self._divisor: float = num_micro_batches
        self._numbers = torch.zeros(num_micro_batches, dtype=torch.int64, device=device)
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)

    @property
    def counts(self) -> bool:
        """Whether valid targets are counted."""
        return self._count is not None

    def prepare(self, targets: Sequence[Tensor]) -> int:
        """Check the loss and a step's targets before anything runs; return how many targets are valid.

        Only the rank that computes the loss calls this. The first call also tries the loss, on outputs of zeros.

        Raises:
            ValueError: the loss or `count` fails, or does not return what it should.
        """
        if not self._was_tried:
            self._try(targets[0])
            self._was_tried = True
        if self._count is None:
            return 0
        try:
            numbers = [torch.as_tensor(self._count(target), device=self._device) for target in targets]
            self._numbers = torch.stack([number.reshape(()) for number in numbers]).to(torch.int64)
        except Exception as error:
            raise ValueError(
                f"count must return the number of valid targets: it failed on targets {list(targets[0].shape)}: "
                f"{error}: return an int or a tensor of one number"
            ) from error
        return int(self._numbers.sum())

    def begin(self, num_targets: int) -> None:
        """Begin a step with `num_targets` valid targets over all replicas.

        Raises:
            ValueError: `count` finds no valid target.
        """
        self.sums.zero_()
        if self._count is None:
            return
        if num_targets < 1:
            raise ValueError(
                f"a step needs at least one valid target: count says {num_targets} over all micro-batches and "
                "replicas: leave such a batch out"
            )
        self._divisor = num_targets / self._num_replicas

    def weighted(self, output: Tensor, target: Tensor, microbatch: int) -> Tensor:
        """Return the micro-batch's share of the step's loss, and add it to `sums`."""
        value = self._loss(output, target)
        if isinstance(value, tuple):
            value, number = value
            self.sums[1] += abs(number - self._numbers[microbatch])
        loss = value / self._divisor
        self.sums[0] += loss.detach()
        return loss

    def total(self, sums: Tensor) -> float:
        """Return the step's loss, given the sum of `sums` over all ranks.

        Raises:
            ValueError: the loss and `count` find different numbers of valid targets.
        """
        loss, difference = sums.tolist()
        if difference:
            raise ValueError(
                f"loss and count must find the same valid targets: their numbers differ by {difference:g} over the "
                "step's micro-batches: make both leave out the same targets"
            )
        return float(loss)

    @torch.no_grad()
    def _try(self, target: Tensor) -> None:
        output = torch.zeros(self._output.shape, dtype=getattr(torch, self._output.dtype), device=self._device)
        devices = [self._device] if self._device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices):
                returned = self._loss(output, target)
        except Exception as error:
            raise ValueError(
                f"the loss must take an output and its target: on {self._output} and {list(target.shape)} it fails: "
                f"{error}: check the targets' shape and dtype"
            ) from error
        if isinstance(returned, tuple) and self._count is None:
            raise ValueError(
                "a loss that returns (sum, number of valid targets) is divided by their number over the whole batch, "
                "which is counted before it: pass count, target -> number, or return a mean"
            )
        value = returned[0] if isinstance(returned, tuple) and len(returned) == 2 else returned
        if not isinstance(value, Tensor) or value.dim() != 0:
            got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            wanted = "sum, or (sum, number of valid targets)" if self._count else "mean"
            raise ValueError(f"loss must return a scalar: got {got}: return its {wanted}")


def autocast_of(device: torch.device) -> str:
    """Return the dtype that autocast computes in on this device, or "off"."""
    is_on = torch.is_autocast_enabled(device.type)
    return str(torch.get_autocast_dtype(device.type)) if is_on else "off"


def check_autocast(constructed: str, device: torch.device) -> None:
    """Raise ValueError unless autocast is the same as when the pipeline was made."""
    if autocast_of(device) != constructed:
        raise ValueError(
            f"autocast must be as it was when the pipeline was made: then {constructed}, now {autocast_of(device)}: "
            "construct the pipeline and run its steps under the same autocast, or put autocast inside the modules"
        )


def check_same_arguments(
    model: nn.Sequential,
    sample: Tensor,
    num_micro_batches: int,
    schedule: str,
    chunks_per_rank: int,
    cut: Sequence[int] | str | None,
    init: Init | None,
    count: Count | None,
    replicas: Communicator | None,
    device: torch.device,
    comm: Communicator,
) -> None:
    """Raise ValueError, on every rank, unless all ranks have the same model and arguments; collective.

    Args:
        device: where the ranks exchange tensors.
        comm: the pipeline's ranks. All other arguments are those of Pipeline.
    """
    arguments = [
        f"num_micro_batches {num_micro_batches}",
        f"schedule {schedule} {chunks_per_rank}",
        f"cut {cut if cut is None or isinstance(cut, str) else list(cut)}",
        f"sample {list(sample.shape)} {sample.dtype} {sample.device.type}",
        f"init {'a state dict' if isinstance(init, Mapping) else 'none' if init is None else 'a function'}",
        f"count {'none' if count is None else 'given'}, {1 if replicas is None else replicas.size} replicas",
        f"autocast {autocast_of(device)}",
    ]
    modules = [type(model).__qualname__, *map(str, model._modules.values())]
    check_same([*describe_model(model), *modules, *arguments], device, comm)


def check_arguments(
    model: nn.Sequential,
    sample: Tensor,
    num_micro_batches: int,
    cut: Sequence[int] | str | None,
    init: Init | None,
    count: Count | None,
    replicas: Communicator | None,
) -> None:
    """Raise ValueError for illegal arguments of Pipeline; all ranks have the same arguments by now."""
    if type(model).forward is not nn.Sequential.forward:
        raise ValueError(
            f"a pipeline runs modules one after another: {type(model).__qualname__} has a forward of its own: pass an "
            "nn.Sequential of its parts"
        )
    if sample.dim() == 0 or sample.shape[0] == 0:
        raise ValueError(f"a sample must have rows: got shape {list(sample.shape)}: pass the input of a micro-batch")
    if num_micro_batches < 1:
        raise ValueError(f"num_micro_batches must be at least 1: got {num_micro_batches}: use 8")
    if isinstance(cut, str) and cut != "measured":
        raise ValueError(f"cut must be the modules of each part, or 'measured': got '{cut}': leave it out")
    if sample.is_meta:
        raise ValueError("a sample says which device to compute on: it is on the meta device: make it on a real one")
    if is_on_meta(model) != (init is not None):
        raise ValueError(
            "init gives values to modules on the meta device, and to no others: "
            + ("pass init, a function or a state dict" if init is None else "none is there: leave init out")
        )
    if replicas is not None and count is None:
        raise ValueError(
            f"replicas need count, the number of valid targets: {replicas.size} replicas, no count: pass "
            "count, or leave replicas out and average the gradients with DataParallel"
        )


def schedule_of_all(
    name: str,
    model: nn.Sequential,
    num_micro_batches: int,
    chunks_per_rank: int,
    device: torch.device,
    comm: Communicator,
) -> Schedule:
    """Make the schedule and check that every rank has made the same one; collective.

    A schedule may be a file, which may be missing on a host, or differ there.

    Raises:
        ValueError: on every rank: a rank cannot read it, it does not fit the model, or ranks have different ones.
    """
    made, problem = None, ""
    try:
        made = make_schedule(name, comm.size, num_micro_batches, chunks_per_rank)
        _check_schedule(made, model)
    except ValueError as error:
        problem = str(error)
    refusing = ranks_where(bool(problem), device, comm)
    if problem or refusing or made is None:
        raise ValueError(problem or f"every rank must be able to read schedule {name}: ranks {refusing} cannot")
    if differing := differing_members(format_schedule(made).encode(), device, comm):
        raise ValueError(
            f"all ranks must have the same schedule: {name} of ranks {differing} differs from that of rank 0: give "
            "all ranks the same file"
        )
    return made


def ranks_where(mine: bool, device: torch.device, comm: Communicator) -> list[int]:
    """Return the ranks that pass True; collective."""
    said = comm.all_gather(torch.tensor([mine], dtype=torch.uint8, device=device))
    return [rank for rank, is_so in enumerate(said.tolist()) if is_so]


def _check_schedule(schedule: Schedule, model: nn.Sequential) -> None:
    num_chunks = len(schedule.ranks)
    if len(model) < num_chunks:
        raise ValueError(
            f"every part of the model needs a module: {len(model)} modules, {schedule.name} makes {num_chunks} parts "
            f"for {schedule.num_ranks} ranks: use fewer ranks or chunks, or split a module"
        )
    if not schedule.splits_backward:
        return
    for name, module in model.named_modules():
        # What has no matrix, such as nn.LayerNorm, has no product to put off: all of its gradient is in I.
        has_matrix = any(p.requires_grad and p.dim() > 1 for p in module.parameters(recurse=False))
        if has_matrix and sink_of(module) is None:
            raise ValueError(
                "a schedule that splits backward needs matrices whose gradients go to a sink: schedule "
                f"{schedule.name}, module {name} is {type(module).__qualname__}, whose halves autograd computes at "
                "once: use modules of tpengine.layers, or schedule 1f1b or interleaved"
            )


def sink_of(module: nn.Module) -> GradientSink | None:
    """Return the sink that a module gives its weight gradients to, or None."""
    sink = getattr(module, "sink", None)
    # A module of the user's own may have a parameter named sink.
    return sink if isinstance(sink, GradientSink) else None


def check_same_plan(plan: Plan, device: torch.device, comm: Communicator) -> None:
    """Raise RuntimeError unless all ranks have the same plan: hosts may run different versions of this package."""
    differing = differing_members(plan.text().encode(), device, comm)
    if differing:
        raise RuntimeError(
            f"all ranks must have the same plan: ranks {differing} differ from rank 0: start every rank with the same "
            "version"
        )
