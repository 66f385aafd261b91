"""Where an nn.Sequential is cut into pipeline stages: by what each module costs, measured on a sample.

One run of the sample through the real modules gives both the costs and the shapes at every boundary; it is made on one
rank and told to the others, so that all cut alike. Nothing of it stays: no gradient, no running statistics, no draw
from the random generators.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tpengine.plan import TensorSpec, partition_layers

_REPEATS = 3


@dataclass(frozen=True)
class ModuleProfile:
    """What one module does to the sample.

    Attributes:
        seconds: forward and backward.
        output: shape and dtype of what it returns.
        differentiable: whether gradients can flow back through the output.
    """

    seconds: float
    output: TensorSpec
    differentiable: bool


def profile(model: nn.Sequential, sample: Tensor) -> list[ModuleProfile]:
    """Run the sample through the modules one by one, forward and backward, and measure each.

    Args:
        model: on its device; left as it was.
        sample: one micro-batch, on the same device.

    Raises:
        ValueError: a module returns no tensor.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = [sample.device] if sample.is_cuda else []
    profiles = []
    try:
        with torch.random.fork_rng(devices=devices):
            x = sample
            for name, module in children_of(model):
                seconds = min(_measure(module, x)[0] for _ in range(1 + _REPEATS))
                _, y = _measure(module, x)
                if not isinstance(y, Tensor):
                    raise ValueError(
                        f"a pipeline's modules must map a tensor to a tensor: module {name} returns "
                        f"{type(y).__name__}: wrap it in a module that returns one"
                    )
                spec = TensorSpec(tuple(y.shape), str(y.dtype).removeprefix("torch."))
                profiles.append(ModuleProfile(seconds, spec, y.dtype.is_floating_point))
                x = y.detach()
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
    return profiles


def children_of(model: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """The modules in the order they run, with their names; one that runs twice is there twice."""
    return [(name, module) for name, module in model._modules.items() if module is not None]


def cut_by_cost(seconds: Sequence[float], num_stages: int) -> tuple[tuple[int, int], ...]:
    """Half-open module range of each stage, so that the slowest stage is as fast as possible.

    Raises:
        ValueError: fewer modules than stages.
    """
    return partition_layers(seconds, 0, 0, num_stages)


def cut_by_hand(sizes: Sequence[int], num_modules: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Half-open module range of each stage from the number of modules each is to hold.

    Raises:
        ValueError: not one size a stage, an empty stage, or another sum than the number of modules.
    """
    if len(sizes) != num_stages or sum(sizes) != num_modules or min(sizes) < 1:
        raise ValueError(
            f"a cut gives every stage at least one module and uses all: cut {list(sizes)}, {num_stages} stages, "
            f"{num_modules} modules: leave cut out, and it is balanced by measured cost"
        )
    ends = [sum(sizes[: stage + 1]) for stage in range(num_stages)]
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def _measure(module: nn.Module, x: Tensor) -> tuple[float, Tensor]:
    """Seconds of one forward and backward, and the output. autograd.grad leaves every .grad alone."""
    # A copy, since a module may work in place.
    x = x.detach().clone().requires_grad_(x.dtype.is_floating_point)
    inputs = [p for p in module.parameters() if p.requires_grad]
    _synchronise(x)
    begin = time.perf_counter()
    with torch.enable_grad():
        y: Tensor = module(x.view_as(x) if not x.requires_grad else x * 1)
    if isinstance(y, Tensor) and y.requires_grad:
        wanted = [*inputs, x] if x.requires_grad else inputs
        torch.autograd.grad(y, wanted, torch.ones_like(y), allow_unused=True)
    _synchronise(x)
    return time.perf_counter() - begin, y


def _synchronise(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
