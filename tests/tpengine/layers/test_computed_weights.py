"""Rung: gloo ranks. Weights that are computed, replaced for a call, hooked or asked for train as torch's layers do.

Each layer beside the same arithmetic on plain tensors, whole. What a sink past autograd would lose is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn
from torch.nn.utils import parametrize
from tpkernels.exchange.communicator import Communicator

from tpengine.layers import Attention, ColumnParallelLinear, RMSNorm, RowParallelLinear, SwiGLU, VocabParallelEmbedding
from tpengine.layers.bias import LearnedPositions
from tpengine.layers.gradient_sink import DeferringSink, GradientSink, WeightHalves
from tpengine.layers.mlp import FeedForward
from tpengine.layers.norm import LayerNorm

D, SEQ, T = 8, 4, 8
DTYPE = torch.float64


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))


class Whole(nn.Module):
    """Calls a layer on all ranks, from the same x[T, D], and returns this rank's part of a loss."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self._call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        """x -> the sum of squares of this rank's outputs."""
        return self._call(self.layer, x).square().sum()


TOKENS = torch.arange(T) * 3 % 8
LAYERS: dict[str, Callable[[Communicator, Any], tuple[nn.Module, Callable[[Any, Tensor], Tensor]]]] = {
    "column": lambda comm, sink: (
        ColumnParallelLinear(D, 6, comm, bias=True, sink=sink, dtype=DTYPE),
        lambda layer, x: layer(x),
    ),
    "row": lambda comm, sink: (
        RowParallelLinear(D * comm.size, 6, comm, bias=True, sink=sink, dtype=DTYPE),
        lambda layer, x: layer(x.repeat(comm.size, 1)),
    ),
    "attention": lambda comm, sink: (
        Attention(D, 2, 2, comm, qkv_bias=True, output_bias=True, sink=sink, dtype=DTYPE),
        lambda layer, x: layer(x, SEQ),
    ),
    "feed-forward": lambda comm, sink: (
        FeedForward(D, 6, comm, gated=False, bias=True, sink=sink, dtype=DTYPE),
        lambda layer, x: layer(x),
    ),
    "swiglu": lambda comm, sink: (SwiGLU(D, 6, comm, sink=sink, dtype=DTYPE), lambda layer, x: layer(x)),
    "norm": lambda comm, sink: (RMSNorm(D, comm, sink=sink, dtype=DTYPE), lambda layer, x: layer(x)),
    "layer norm": lambda comm, sink: (LayerNorm(D, comm, sink=sink, dtype=DTYPE), lambda layer, x: layer.add(x, x)[0]),
    "embedding": lambda comm, sink: (
        VocabParallelEmbedding(8, D, comm, sink=sink, dtype=DTYPE),
        lambda layer, x: layer(TOKENS) * x,
    ),
    "positions": lambda comm, sink: (
        LearnedPositions(SEQ, D, comm, sink=sink, dtype=DTYPE),
        lambda layer, x: layer(x, SEQ),
    ),
}


def made(name: str, comm: Communicator, sink: Any = None) -> tuple[Whole, Tensor]:
    torch.manual_seed(11 + comm.rank)
    model = Whole(*LAYERS[name](comm, sink))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, dtype=DTYPE))
    return model, draw(5, T, D).chunk(comm.size)[comm.rank].contiguous().requires_grad_()


class Scaled(nn.Module):
    """A LoRA, of a vector or of a matrix: w + a b, or w a."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(draw(1, *weight.shape[:-1], 1) if weight.dim() > 1 else draw(1, 1))
        self.b = nn.Parameter(draw(2, 1, weight.shape[-1])) if weight.dim() > 1 else None

    def forward(self, weight: Tensor) -> Tensor:
        """The weight that the layer uses."""
        return weight * self.a if self.b is None else weight + self.a @ self.b


def plain_gradients(model: Whole, x: Tensor) -> dict[str, Tensor]:
    """Gradients of the layer's own parameters, and of x, without anything computed."""
    fresh = copy.deepcopy(model)
    leaf = x.detach().clone().requires_grad_()
    fresh(leaf).backward()
    assert leaf.grad is not None or "Embedding" in type(model.layer).__name__
    return {name: p.grad for name, p in fresh.named_parameters() if p.grad is not None}


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def close(got: Tensor | None, want: Tensor, what: object) -> None:
    assert got is not None, what
    assert torch.allclose(got, want, rtol=1e-9, atol=1e-9), what


def weights_of(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(part, name) for part in model.modules() for name, _ in part.named_parameters(recurse=False)]


def check_parametrized(name: str) -> None:
    """The chain rule through the parametrization, from the gradient that the plain layer has of the same weight."""
    comm = Communicator(dist.group.WORLD)
    model, x = made(name, comm)
    for part, weight in weights_of(model):
        parametrize.register_parametrization(part, weight, Scaled(getattr(part, weight).detach()))
    model(x).backward()
    flat, _ = made(name, comm)
    computed = {f"{path}.{weight}": getattr(part, weight) for path, part, weight in parametrized(model)}
    with torch.no_grad():
        for path, value in computed.items():
            flat.get_parameter(path).copy_(value)
    wanted = plain_gradients(flat, x)
    leaves = [p for p in model.parameters() if p.requires_grad]
    want = torch.autograd.grad(list(computed.values()), leaves, [wanted[path] for path in computed])
    for leaf, gradient in zip(leaves, want, strict=True):
        close(leaf.grad, gradient, name)
        assert gradient.any()


def parametrized(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    found = []
    for path, part in model.named_modules():
        if parametrize.is_parametrized(part):
            found += [(path, part, weight) for weight in part.parametrizations]  # type: ignore[union-attr]
    return found


def check_replaced_for_a_call(name: str) -> None:
    """functional_call beside a call of the module: each has the gradients of its own weights, in one backward."""
    comm = Communicator(dist.group.WORLD)
    model, x = made(name, comm)
    others = {path: (value * 1.5).requires_grad_() for path, value in values(model).items()}
    used = {path: value * 1.0 for path, value in others.items()}
    loss = model(x)
    (loss + torch.func.functional_call(model, used, (x,))).backward()
    flat, _ = made(name, comm)
    for path, gradient in plain_gradients(flat, x).items():
        close(model.get_parameter(path).grad, gradient, (name, path))
    flat.load_state_dict({path: value.detach() for path, value in others.items()})
    for path, gradient in plain_gradients(flat, x).items():
        close(others[path].grad, gradient, (name, path))


def check_hooked_and_asked_for(name: str) -> None:
    """Hooks change and see the gradient; autograd.grad returns it, and touches no `.grad`."""
    comm = Communicator(dist.group.WORLD)
    model, x = made(name, comm)
    want = plain_gradients(model, x)
    found = torch.autograd.grad(model(x), list(model.parameters()))
    for (path, parameter), gradient in zip(model.named_parameters(), found, strict=True):
        close(gradient, want[path], (name, path))
        assert parameter.grad is None
    seen: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)
        parameter.register_post_accumulate_grad_hook(seen.append)
    model(x).backward()
    assert {id(p) for p in seen} == {id(p) for p in model.parameters()}
    for path, parameter in model.named_parameters():
        close(parameter.grad, 2 * want[path], (name, path))


def check_module_hooks(name: str) -> None:
    """A hook of any module inside is called, and what it returns counts, packed or not."""
    comm = Communicator(dist.group.WORLD)
    model, x = made(name, comm)
    want = plain_gradients(model, x)
    called: set[nn.Module] = set()
    for part in model.modules():
        if list(part.parameters(recurse=False)) and not isinstance(part, LayerNorm):
            part.register_forward_hook(lambda part, *_: called.add(part))
            part.register_full_backward_hook(lambda part, *_: called.add(part))
    model(x).backward()
    wanted = {part for part, _ in weights_of(model) if not isinstance(part, LayerNorm)}
    assert called == wanted
    for path, parameter in model.named_parameters():
        close(parameter.grad, want[path], (name, path))


class Doubled(nn.Module):
    """A wrapper, as adapters are."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.tensor(2.0, dtype=DTYPE))

    def forward(self, x: Tensor) -> Tensor:
        """What the inner one returns, scaled."""
        y: Tensor = self.inner(x)
        return y * self.scale


def check_wrapped() -> None:
    """A module in the place of a packed layer is the one that is called."""
    comm = Communicator(dist.group.WORLD)
    for name, child in (("attention", "k_proj"), ("swiglu", "up_proj"), ("feed-forward", "up_proj")):
        model, x = made(name, comm)
        flat = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in getattr(flat.layer, child).parameters():
                parameter.mul_(2)
        setattr(model.layer, child, Doubled(getattr(model.layer, child)))
        loss = model(x)
        close(loss, flat(x), name)
        loss.backward()
        wrapper = getattr(model.layer, child)
        assert wrapper.scale.grad and wrapper.inner.weight.grad.any()


CHECKS = (check_parametrized, check_replaced_for_a_call, check_hooked_and_asked_for, check_module_hooks)


def check_all(names: tuple[str, ...]) -> None:
    for name in names:
        for check in CHECKS:
            check(name)
    check_wrapped()


@pytest.mark.by_default("2")
@pytest.mark.parametrize("world", [1, 2])
def test_computed_replaced_and_hooked_weights_train_as_torchs(ranks: RankPool, world: int) -> None:
    ranks.run(check_all, world, tuple(LAYERS))


def refusals(name: str, sink: Any, change: Callable[[nn.Module, str], object]) -> list[str]:
    """What a layer says of each of its weights, changed one at a time."""
    said = []
    model, _ = made(name, Communicator(None))
    for i in range(len(weights_of(model))):
        model, x = made(name, Communicator(None), sink)
        part, weight = weights_of(model)[i]
        change(part, weight)
        with pytest.raises(ValueError) as error:
            model(x)
        said.append(str(error.value))
        with torch.no_grad():
            model(x)
    return said


def parametrized_one(part: nn.Module, weight: str) -> None:
    parametrize.register_parametrization(part, weight, Scaled(getattr(part, weight).detach()))


def hooked(part: nn.Module, weight: str) -> None:
    getattr(part, weight).register_hook(lambda gradient: gradient)


@pytest.mark.parametrize("name", LAYERS)
def test_what_a_sink_past_autograd_would_lose_is_refused(name: str) -> None:
    buffers = GradientSink()
    buffers.attach({}, SimpleNamespace(contributed=lambda _: None))
    for sink in (buffers, DeferringSink(buffers, WeightHalves())):
        for change, word in ((parametrized_one, "is computed"), (hooked, "has hooks")):
            for message in refusals(name, sink, change):
                assert "\n" not in message and word in message and "train the layer with its default sink" in message
    for change, word in ((parametrized_one, "is computed"), (hooked, "has hooks")):
        for message in refusals(name, DeferringSink(GradientSink(), WeightHalves()), change):
            assert word in message and "use schedule 1f1b or interleaved" in message


def test_a_weight_half_calls_the_hooks_that_follow_an_accumulation() -> None:
    """When the gradient is there; autograd calls them at the end of the input half too."""
    halves = WeightHalves()
    for name in LAYERS:
        model, x = made(name, Communicator(None), DeferringSink(GradientSink(), halves))
        want = plain_gradients(model, x)
        seen: dict[Tensor, Tensor | None] = {}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.update({p: p.grad}))  # type: ignore[misc]
        with halves.of((0, 0)):
            model(x).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        halves.run((0, 0))
        assert all(seen[parameter] is parameter.grad for parameter in model.parameters())
        for path, parameter in model.named_parameters():
            close(parameter.grad, want[path], (name, path))
