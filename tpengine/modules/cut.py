"""Cut an nn.Sequential into the parts of a pipeline, by hand or by the cost of each module on a sample.

The sample runs through the modules one by one, forward and backward. One rank does this and sends the profile to the
others, so that all cut alike. It leaves no trace: gradients, running statistics and random generators stay as they are.

By default the cost is counted, not measured, so that every replica and every start cuts alike. Modules on the meta
device run there, on a copy, since a module may keep what it has computed. Some cannot run there: they exchange with
other ranks, or read values, or autocast is on, which does not support the meta device. Of these a copy filled with
zeros runs on the real device, one module at a time.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from tpkernels.exchange.communicator import Communicator

from tpengine.distributed.agreement import all_gather_json, broadcast_json
from tpengine.model.meta_modules import is_on_meta, materialise
from tpengine.plan import Chunk, TensorSpec, partition_layers

_REPEATS = 3
# Per element of a parameter or an output: what reading and writing it in forward and backward costs, in flops.
FLOPS_PER_ELEMENT = 32


@dataclass(frozen=True)
class ModuleProfile:
    """The profile of one module.

    Attributes:
        cost: forward and backward, as counted (see `profile`) or in measured seconds.
        output: shape and dtype of what it returns.
        differentiable: whether the output's dtype can carry a gradient.
        passes_gradient: whether the input gets a gradient if the output has one; False for the first module.
        in_place: whether it may overwrite its input.
    """

    cost: float
    output: TensorSpec
    differentiable: bool
    passes_gradient: bool
    in_place: bool


def children_of(model: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """Return the modules with their names, in the order they run; a module that runs twice is listed twice."""
    return [(name, module) for name, module in model._modules.items() if module is not None]


def profile(model: nn.Sequential, sample: Tensor, *, measured: bool = False) -> list[ModuleProfile]:
    """Profile the modules one by one on a sample, forward and backward.

        cost = flops of products, convolutions and attention + 32 * (elements of parameters + elements of the output)

    A product inside a kernel that torch does not see (Triton's) is not counted.

    Args:
        model: on its device or on the meta device; it is left unchanged.
        sample: one micro-batch, on the device to compute on.
        measured: take as cost the seconds of the fastest of some runs on this machine.

    Raises:
        ValueError: a module does not return a tensor.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if not buffer.is_meta}
    # Put every .grad away: layers with a gradient sink add to .grad even under torch.autograd.grad.
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in gradients:
        parameter.grad = None
    devices = [sample.device] if sample.is_cuda else []
    profiles = []
    try:
        with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
            # The flop counter's hooks warn about compiled modules; we only read its total.
            warnings.filterwarnings("ignore", message="Using `torch.compile")
            torch.manual_seed(0)
            x = sample
            for place, (name, module) in enumerate(children_of(model)):
                # The model's input needs no gradient; the input of every other stage does.
                run = _run_anywhere(module, x, place > 0, sample.device, measured)
                y = run.output
                if not isinstance(y, Tensor):
                    raise ValueError(
                        f"a pipeline's modules must map a tensor to a tensor: module {name} returns "
                        f"{type(y).__name__}: wrap it in a module that returns one"
                    )
                spec = TensorSpec(tuple(y.shape), str(y.dtype).removeprefix("torch."))
                size = sum(p.numel() for p in module.parameters()) + y.numel()
                cost = run.seconds if measured else run.flops + FLOPS_PER_ELEMENT * size
                profiles.append(ModuleProfile(cost, spec, y.dtype.is_floating_point, run.passes_gradient, run.in_place))
                x = y.detach()
    finally:
        # Restore buffers and gradients.
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if not buffer.is_meta:
                    buffer.copy_(buffers[name])
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
    return profiles


def profile_on_rank_0(
    model: nn.Sequential, sample: Tensor, comm: Communicator, *, measured: bool
) -> list[ModuleProfile]:
    """Run `profile` on the group's rank 0 and send its result to all ranks; a failure there is raised on all."""
    told: list[dict[str, Any]] | str = ""
    if comm.rank == 0:
        try:
            told = [asdict(module) for module in profile(model, sample, measured=measured)]
        except Exception as error:
            told = f"the sample must run through the model: {error}: check the sample's shape, dtype and device"
    told = broadcast_json(told, comm.group)
    if isinstance(told, str):
        raise ValueError(told)
    return [ModuleProfile(**{**row, "output": _spec(**row["output"])}) for row in told]


def slowest_over_world(
    seconds: Sequence[float], problem: str, world: Communicator, device: torch.device
) -> list[float]:
    """Return the longest time of each module over all pipelines, the same on all ranks of the world; collective.

    Args:
        seconds: times of this pipeline's modules.
        problem: why there are none; else empty.
        world: the ranks of all pipelines.
        device: where the ranks exchange tensors.

    Raises:
        ValueError: on every rank: a pipeline has a problem, or their numbers of modules differ.
    """
    told = all_gather_json([len(seconds), problem], world.group)
    failed = [rank for rank, (_, of_rank) in enumerate(told) if of_rank]
    if failed:
        alone = f" (ranks {failed} alone found this)" if len(failed) < len(told) else ""
        raise ValueError(told[failed[0]][1] + alone)
    counts = [count for count, _ in told]
    if len(set(counts)) > 1:
        raise ValueError(
            f"pipelines that are measured together must have the same modules: numbers of modules by rank {counts}: "
            "give the cut by hand, or leave it out"
        )
    together = world.all_reduce_max_(torch.tensor(seconds, dtype=torch.float64, device=device))
    return [float(one) for one in together.tolist()]


def _spec(shape: Sequence[int], dtype: str) -> TensorSpec:
    return TensorSpec(tuple(shape), dtype)


@dataclass(frozen=True)
class _RunOfModules:
    seconds: float
    flops: int
    output: Tensor
    passes_gradient: bool
    in_place: bool


def _run_anywhere(
    module: nn.Module, x: Tensor, input_gradient: bool, device: torch.device, measured: bool
) -> _RunOfModules:
    """Run a module on the device of its tensors; if it cannot run on meta, run a copy of zeros on `device`."""
    if is_on_meta(module):
        if not measured and not _exchanges(module) and not torch.is_autocast_enabled(device.type):
            try:
                return _run(_copied(module), x.to("meta"), input_gradient)
            except Exception:
                # It needs values, or has no kernel for meta. If the module itself is wrong, it fails again below.
                pass
        module = _copied(module)
        materialise(module, device, fill=0)
    if x.device != device:
        x = torch.zeros(x.shape, dtype=x.dtype, device=device)
    if not measured:
        return _run(module, x, input_gradient)
    runs = [_run(module, x, input_gradient, counted=False) for _ in range(1 + _REPEATS)]
    return min(runs, key=lambda run: run.seconds)


def _run(module: nn.Module, x: Tensor, input_gradient: bool, *, counted: bool = True) -> _RunOfModules:
    """Run forward and backward once; autograd.grad does not touch .grad."""
    # A copy, since a module may work in place.
    leaf = x.detach().clone().requires_grad_(input_gradient and x.dtype.is_floating_point)
    wanted = [p for p in module.parameters() if p.requires_grad] + [leaf] * leaf.requires_grad
    counter = FlopCounterMode(display=False, custom_mapping=_formulas()) if counted else None
    _synchronise(x)
    begin = time.perf_counter()
    if counter is not None:
        counter.__enter__()
    try:
        with torch.enable_grad():
            given = leaf.view_as(leaf) if not leaf.requires_grad else leaf * 1
            version = given._version
            y: Tensor = module(given)
        grads: Sequence[Tensor | None] = ()
        if isinstance(y, Tensor) and y.requires_grad and wanted:
            grads = torch.autograd.grad(y, wanted, torch.ones_like(y), allow_unused=True)
    finally:
        if counter is not None:
            counter.__exit__(None, None, None)
    _synchronise(x)
    seconds = time.perf_counter() - begin
    flops = counter.get_total_flops() if counter is not None else 0
    in_place = given._version != version or any(getattr(m, "inplace", False) for m in module.modules())
    return _RunOfModules(seconds, flops, y, leaf.requires_grad and bool(grads) and grads[-1] is not None, in_place)


def _formulas() -> dict[Any, Any]:
    """Return flop formulas that torch's counter lacks: oneDNN's linear, in-place products, CPU attention."""
    aten = torch.ops.aten
    formulas = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda dy, q, k, v, *_, **__: (
            sdpa_backward_flop_count(dy, q, k, v)
        ),
        aten.addmm_: flop_registry[aten.addmm],
        aten.baddbmm_: flop_registry[aten.baddbmm],
    }
    linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if linear is not None:
        formulas[linear] = lambda x, *_, out_shape, **__: 2 * math.prod(x) * out_shape[-1]
    return formulas


def _exchanges(module: nn.Module) -> bool:
    """Return whether the module holds a communicator of several ranks, or a process group."""
    return any(
        (isinstance(value, Communicator) and value.size > 1) or isinstance(value, ProcessGroup)
        for part in module.modules()
        for value in vars(part).values()
    )


def _copied(module: nn.Module) -> nn.Module:
    """Return a deep copy that shares the communicators and process groups."""
    shared = {
        id(value): value
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, Communicator | ProcessGroup)
    }
    return copy.deepcopy(module, dict(shared))


def _synchronise(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def cut_by_cost(costs: Sequence[float], ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the half-open module range of each part that makes the slowest rank fastest: see `partition_layers`.

    Raises:
        ValueError: fewer modules than parts.
    """
    return partition_layers(costs, 0, 0, ranks)


def cut_by_hand(sizes: Sequence[int], num_modules: int, num_chunks: int) -> tuple[tuple[int, int], ...]:
    """Return the half-open module range of each part, given the number of modules per part.

    Raises:
        ValueError: there is not one size per part, a size is below 1, or they do not sum to the number of modules.
    """
    if len(sizes) != num_chunks or sum(sizes) != num_modules or min(sizes) < 1:
        raise ValueError(
            f"a cut gives every part at least one module and uses all: cut {list(sizes)}, {num_chunks} parts, "
            f"{num_modules} modules: leave cut out, and it is balanced by cost"
        )
    ends = [sum(sizes[: chunk + 1]) for chunk in range(num_chunks)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def check_cut(
    model: nn.Sequential,
    layers: Sequence[tuple[int, int]],
    ranks: Sequence[int],
    profiles: Sequence[ModuleProfile],
) -> None:
    """Refuse a cut whose parts cannot train as the whole model does.

    Args:
        layers, ranks: module range and rank of each part.

    Raises:
        ValueError: two ranks share a parameter or buffer, or a part other than the first passes no gradient back.
    """
    modules = children_of(model)
    owner: dict[Tensor, int] = {}
    for chunk, ((first, last), rank) in enumerate(zip(layers, ranks, strict=True)):
        held = nn.Sequential(OrderedDict(modules[first:last]))
        for kind, named in (("parameter", held.named_parameters()), ("buffer", held.named_buffers())):
            for name, tensor in named:
                if owner.setdefault(tensor, rank) != rank:
                    raise ValueError(
                        f"a {kind} must belong to one rank: {name} of rank {rank} is shared with rank "
                        f"{owner[tensor]}: choose a cut that keeps both uses together, or untie them"
                    )
        if last < len(modules) and not profiles[last - 1].differentiable:
            raise ValueError(
                f"the output of a part must be able to carry a gradient: module {modules[last - 1][0]} returns "
                f"{profiles[last - 1].output}: choose a cut elsewhere"
            )
        for place in range(first, last):
            if chunk > 0 and not profiles[place].passes_gradient:
                raise ValueError(
                    f"only the first part may stop gradients: module {modules[place][0]} of part {chunk} passes none "
                    "to its input: choose a cut that has it in the first part"
                )


def chunks_of(
    layers: Sequence[tuple[int, int]], ranks: Sequence[int], profiles: Sequence[ModuleProfile]
) -> tuple[Chunk, ...]:
    """Return the plan's chunks, each with the shape and dtype of its input and output."""
    boundary = [profiles[last - 1].output for _, last in layers]
    return tuple(
        Chunk(
            rank,
            span,
            input=boundary[chunk - 1] if chunk > 0 else None,
            output=boundary[chunk] if chunk < len(layers) - 1 else None,
        )
        for chunk, (span, rank) in enumerate(zip(layers, ranks, strict=True))
    )
