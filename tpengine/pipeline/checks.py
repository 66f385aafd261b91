"""Checks of a pipeline before it runs: arguments, schedules and plans. Every rank refuses the same ones.

What is deliberately elsewhere: whether the parts of a cut can train (cut.py), checks of a step's batch (sequential.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from tpkernels.exchange.communicator import Communicator

from tpengine.distributed.agreement import check_same, describe_model, differing_members
from tpengine.layers.gradient_sink import GradientSink
from tpengine.model.meta_modules import Init, is_on_meta
from tpengine.pipeline.loss import Count
from tpengine.plan import Plan, Schedule, make_schedule
from tpengine.plan.schedule_file import format_schedule


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
