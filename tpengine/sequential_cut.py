"""Where an nn.Sequential is cut into the parts of a pipeline: by what each module costs, measured on a sample.

One run of the sample through the real modules gives both the costs and the shapes at every boundary; it is made on one
rank and told to the others, so that all cut alike. Nothing of it stays: no gradient, no running statistics, no draw
from the random generators.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpengine.collectives import Communicator
from tpengine.plan import Chunk, TensorSpec, partition_layers

_REPEATS = 3


@dataclass(frozen=True)
class ModuleProfile:
    """What one module does to the sample.

    Attributes:
        seconds: forward and backward.
        output: shape and dtype of what it returns.
        differentiable: whether the output's dtype can carry a gradient.
        passes_gradient: whether the input gets one, given one for the output.
        in_place: whether it may overwrite its input.
    """

    seconds: float
    output: TensorSpec
    differentiable: bool
    passes_gradient: bool
    in_place: bool


def profile(model: nn.Sequential, sample: Tensor) -> list[ModuleProfile]:
    """Run the sample through the modules one by one, forward and backward, and measure each.

    Args:
        model: on its device; left as it was.
        sample: one micro-batch, on the same device.

    Raises:
        ValueError: a module returns no tensor.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    # Layers with a gradient sink add to .grad by themselves, whatever autograd is asked for.
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    for parameter in gradients:
        parameter.grad = None
    devices = [sample.device] if sample.is_cuda else []
    profiles = []
    try:
        with torch.random.fork_rng(devices=devices):
            x = sample
            for place, (name, module) in enumerate(children_of(model)):
                # The model's input needs no gradient; where a stage begins later, its input does.
                seconds = min(_measure(module, x, place > 0).seconds for _ in range(1 + _REPEATS))
                run = _measure(module, x, True)
                y = run.output
                if not isinstance(y, Tensor):
                    raise ValueError(
                        f"a pipeline's modules must map a tensor to a tensor: module {name} returns "
                        f"{type(y).__name__}: wrap it in a module that returns one"
                    )
                spec = TensorSpec(tuple(y.shape), str(y.dtype).removeprefix("torch."))
                profiles.append(
                    ModuleProfile(seconds, spec, y.dtype.is_floating_point, run.passes_gradient, run.in_place)
                )
                x = y.detach()
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
    return profiles


def profile_on_rank_0(model: nn.Sequential, sample: Tensor, comm: Communicator) -> list[ModuleProfile]:
    """`profile` on the group's rank 0, told to all ranks; what fails there fails on all of them."""
    told: list[list[ModuleProfile] | str | None] = [None]
    if comm.rank == 0:
        try:
            told = [profile(model, sample)]
        except Exception as error:
            told = [f"the sample must run through the model: {error}: check the sample's shape, dtype and device"]
    link = sample.device if dist.get_backend(comm.group) == "nccl" else torch.device("cpu")
    dist.broadcast_object_list(told, group=comm.group, group_src=0, device=link)
    (profiles,) = told
    if isinstance(profiles, str):
        raise ValueError(profiles)
    assert profiles is not None
    return profiles


def children_of(model: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """The modules in the order they run, with their names; one that runs twice is there twice."""
    return [(name, module) for name, module in model._modules.items() if module is not None]


def cut_by_cost(seconds: Sequence[float], ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Half-open module range of each part, so that the slowest of the parts' ranks is fast: see `partition_layers`.

    Raises:
        ValueError: fewer modules than parts.
    """
    return partition_layers(seconds, 0, 0, ranks)


def cut_by_hand(sizes: Sequence[int], num_modules: int, num_chunks: int) -> tuple[tuple[int, int], ...]:
    """Half-open module range of each part from the number of modules each is to hold.

    Raises:
        ValueError: not one size a part, an empty one, or another sum than the number of modules.
    """
    if len(sizes) != num_chunks or sum(sizes) != num_modules or min(sizes) < 1:
        raise ValueError(
            f"a cut gives every part at least one module and uses all: cut {list(sizes)}, {num_chunks} parts, "
            f"{num_modules} modules: leave cut out, and it is balanced by measured cost"
        )
    ends = [sum(sizes[: chunk + 1]) for chunk in range(num_chunks)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def check_cut(
    model: nn.Sequential,
    layers: Sequence[tuple[int, int]],
    ranks: Sequence[int],
    profiles: Sequence[ModuleProfile],
) -> None:
    """Refuse a cut whose parts could not train as the whole model does.

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
                        f"{owner[tensor]}: choose a cut that keeps both uses together"
                    )
        if last < len(modules) and not profiles[last - 1].differentiable:
            raise ValueError(
                f"what crosses the end of a part must carry a gradient: module {modules[last - 1][0]} returns "
                f"{profiles[last - 1].output}: choose a cut elsewhere"
            )
        for place in range(first, last):
            if chunk > 0 and not profiles[place].passes_gradient:
                raise ValueError(
                    f"only the first part may end gradients: module {modules[place][0]} of part {chunk} passes none "
                    "to its input: choose a cut that has it in the first part"
                )


def chunks_of(
    layers: Sequence[tuple[int, int]], ranks: Sequence[int], profiles: Sequence[ModuleProfile]
) -> tuple[Chunk, ...]:
    """The plan's chunks, with what crosses between them."""
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


@dataclass(frozen=True)
class _Run:
    seconds: float
    output: Tensor
    passes_gradient: bool
    in_place: bool


def _measure(module: nn.Module, x: Tensor, input_gradient: bool) -> _Run:
    """Run forward and backward once. autograd.grad leaves every .grad alone."""
    # A copy, since a module may work in place.
    leaf = x.detach().clone().requires_grad_(input_gradient and x.dtype.is_floating_point)
    wanted = [p for p in module.parameters() if p.requires_grad] + [leaf] * leaf.requires_grad
    _synchronise(x)
    begin = time.perf_counter()
    with torch.enable_grad():
        given = leaf.view_as(leaf) if not leaf.requires_grad else leaf * 1
        version = given._version
        y: Tensor = module(given)
    grads: Sequence[Tensor | None] = ()
    if isinstance(y, Tensor) and y.requires_grad and wanted:
        grads = torch.autograd.grad(y, wanted, torch.ones_like(y), allow_unused=True)
    _synchronise(x)
    seconds = time.perf_counter() - begin
    in_place = given._version != version or any(getattr(m, "inplace", False) for m in module.modules())
    return _Run(seconds, y, leaf.requires_grad and bool(grads) and grads[-1] is not None, in_place)


def _synchronise(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
