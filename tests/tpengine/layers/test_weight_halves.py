"""Rung: pure and gloo ranks. Input and weight halves apart: equal gradients in equal order, nothing kept too long."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from torch import Tensor
from torch.nn import Parameter
from tpkernels.exchange.communicator import Communicator

from tpengine.layers import Attention, RMSNorm, SwiGLU
from tpengine.layers.gradient_sink import DeferringSink, GradientSink, WeightHalves


def test_nothing_is_added_before_the_weight_half_and_all_of_it_in_order() -> None:
    weight, log = Parameter(torch.zeros(2, 3, dtype=torch.float64)), []
    inner, halves = GradientSink(), WeightHalves()
    buffer = torch.zeros(2, 3, dtype=torch.float64)
    inner.attach({weight: (buffer, 0)}, SimpleNamespace(contributed=lambda _: log.append(buffer.clone())))
    sink = DeferringSink(inner, halves)
    x, dy = torch.ones(4, 3, dtype=torch.float64), torch.ones(4, 2, dtype=torch.float64)
    with halves.of((0, 7)):
        assert sink.defers
        sink.weight_grad(weight, x, dy)
        sink.add(weight, torch.full((2, 3), 10.0, dtype=torch.float64))
    assert not sink.defers and not log and not buffer.any()
    halves.run((0, 7))
    assert [float(seen[0, 0]) for seen in log] == [4, 14]
    sink.weight_grad(weight, x, dy)
    assert float(buffer[0, 0]) == 18
    with pytest.raises(KeyError):
        halves.run((0, 7))


def test_what_a_contribution_multiplied_is_free_when_it_has_been_added() -> None:
    halves, alive = WeightHalves(), []
    weight = Parameter(torch.zeros(1, 1))

    class Watching(GradientSink):
        def weight_grad(self, param: Parameter, x: Tensor, dy: Tensor, partial: Communicator | None = None) -> None:
            gc.collect()
            alive.append([watched() is not None for watched in inputs])

    sink = DeferringSink(Watching(), halves)
    inputs: list[weakref.ref[Tensor]] = []
    with halves.of((0, 0)):
        for _ in range(3):
            x = torch.ones(1, 1)
            inputs.append(weakref.ref(x))
            sink.weight_grad(weight, x, x)
            del x
    halves.run((0, 0))
    assert alive == [[True, True, True], [False, True, True], [False, False, True]]


def test_a_failed_input_half_leaves_no_half_open() -> None:
    halves = WeightHalves()
    with pytest.raises(RuntimeError, match="boom"), halves.of((0, 0)):
        raise RuntimeError("boom")
    assert not halves.is_open


def gradients(split: bool, gathers_again: bool) -> tuple[dict[str, Tensor], Tensor, int]:
    """Run norm, attention and feed-forward, backward in one or in two halves; the number of gathers in W."""
    comm = Communicator(dist.group.WORLD)
    halves = WeightHalves()
    sink = DeferringSink(GradientSink(), halves)
    torch.manual_seed(3)
    options: dict[str, object] = dict(sink=sink, dtype=torch.float64)
    layers = torch.nn.ModuleDict(
        {
            "norm": RMSNorm(16, comm, **options),  # type: ignore[arg-type]
            "attention": Attention(16, 4, 2, comm, gathers_again=gathers_again, **options),  # type: ignore[arg-type]
            "mlp": SwiGLU(16, 24, comm, gathers_again=gathers_again, **options),  # type: ignore[arg-type]
        }
    )
    x = torch.randn(8 // comm.size * 2, 16, dtype=torch.float64, requires_grad=True)
    y = layers["mlp"](layers["attention"](layers["norm"](x), 8))
    num_gathers = 0
    gather = comm.all_gather

    def counted(shard: Tensor) -> Tensor:
        nonlocal num_gathers
        num_gathers += 1
        return gather(shard)

    if not split:
        y.square().sum().backward()
    else:
        with halves.of((0, 0)):
            y.square().sum().backward()
        assert all(p.grad is None for p in layers.parameters())
        comm.all_gather = counted  # type: ignore[method-assign]
        halves.run((0, 0))
    assert x.grad is not None
    return {name: p.grad.clone() for name, p in layers.named_parameters() if p.grad is not None}, x.grad, num_gathers


def compare_halves(gathers_again: bool) -> None:
    whole, dx, _ = gradients(split=False, gathers_again=False)
    apart, dx_apart, num_gathers = gradients(split=True, gathers_again=gathers_again)
    assert len(whole) == 8 and whole.keys() == apart.keys()
    assert torch.equal(dx, dx_apart)
    for name, gradient in whole.items():
        assert torch.equal(gradient, apart[name]), name
    unsplit, dx_again, _ = gradients(split=False, gathers_again=True)
    assert torch.equal(dx, dx_again) and all(torch.equal(unsplit[name], whole[name]) for name in whole)
    # Two gathers of inputs for the column-parallel layers, two of output gradients for the row-parallel ones.
    assert num_gathers == (4 if gathers_again else 0), num_gathers


@pytest.mark.parametrize("gathers_again", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_two_halves_give_the_bits_of_one_backward(ranks: RankPool, world: int, gathers_again: bool) -> None:
    ranks.run(compare_halves, world, gathers_again)
