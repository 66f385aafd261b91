"""Rung: gloo ranks. torch.compile of a block: the same values and gradients as without, communication included.

A whole block takes ten seconds per rank to compile. By default only its MLP is compiled: it has both kinds of
communication.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn
from tpkernels.exchange.communicator import Communicator

from tpengine.architectures.registry import architecture_of
from tpengine.config import ModelConfig
from tpengine.layers.bias import add_cut_bias
from tpengine.layers.column import ColumnParallelLinear
from tpengine.layers.gradient_sink import GradientSink
from tpengine.layers.row import RowParallelLinear
from tpengine.model.block import Block
from tpengine.model.parts import FastParts

SEQ, TOKENS = 16, 32


def part_of(name: str, comm: Communicator, sink: GradientSink | None = None) -> nn.Module:
    torch.manual_seed(comm.rank)
    model = ModelConfig(hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=4, ffn_size=48)
    architecture = architecture_of(model)
    block = Block(FastParts(model, comm, sink=sink), architecture.block(model, 0), architecture.order)
    return block if name == "block" else block.mlp


def values_and_gradients(part: nn.Module, run: object) -> dict[str, Tensor]:
    assert callable(run)
    x = torch.randn(TOKENS // dist.get_world_size(), 32, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    part.zero_grad()
    y = run(x, SEQ) if isinstance(part, Block) else run(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad} | {n: p.grad for n, p in part.named_parameters() if p.grad is not None}


def check_compiled(name: str, arena_bytes: int) -> None:
    comm = Communicator(dist.group.WORLD, arena_bytes=arena_bytes)
    assert (comm.arena is not None) == (arena_bytes > 0 and comm.size > 1)
    part = part_of(name, comm)
    want = values_and_gradients(part, part)
    assert len(want) == {"block": 11, "mlp": 5}[name]
    got = values_and_gradients(part, torch.compile(part, backend="aot_eager"))
    for what, tensor in want.items():
        torch.testing.assert_close(got[what], tensor, rtol=1e-4, atol=1e-5, msg=lambda m, n=what: f"{n}: {m}")
    torch._dynamo.reset()


def check_shared_biases() -> None:
    """A bias that ranks share, as keys' and values' with fewer heads than ranks, is summed over them."""
    tp = Communicator(dist.group.WORLD)
    bias = nn.Parameter(torch.zeros(4))

    def added(x: Tensor) -> Tensor:
        return add_cut_bias(x * 2, [(bias, tp)], GradientSink())

    for run in (added, torch.compile(added, backend="eager")):
        bias.grad = None
        run(torch.ones(3, 4, requires_grad=True)).backward(torch.full((3, 4), tp.rank + 1.0))
        assert bias.grad is not None and bias.grad.tolist() == [3.0 * (1 + 2)] * 4
    torch._dynamo.reset()


@pytest.mark.slow
def test_shared_biases_are_summed_under_the_compiler(ranks: RankPool) -> None:
    ranks.run(check_shared_biases, 2)


def check_sinks_are_kept(name: str) -> None:
    """The engine's own sink is not traced: its buffers get the gradients, and .grad stays empty."""
    comm, sink = Communicator(dist.group.WORLD, arena_bytes=1 << 20), GradientSink()
    part = part_of(name, comm, sink)
    buffers = {p: torch.zeros_like(p) for p in part.parameters()}
    sink.attach({p: (buffer, 0) for p, buffer in buffers.items()}, SimpleNamespace(contributed=lambda _: None))
    assert set(values_and_gradients(part, part)) == {"y", "dx"}
    want = {p: buffer.clone() for p, buffer in buffers.items()}
    for buffer in buffers.values():
        buffer.zero_()
    assert set(values_and_gradients(part, torch.compile(part, backend="aot_eager"))) == {"y", "dx"}
    for parameter, buffer in buffers.items():
        assert buffer.any()
        torch.testing.assert_close(buffer, want[parameter], rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "world", "arena_bytes"),
    [
        ("mlp", 2, 1 << 20),
        *(pytest.param("block", *sizes, marks=pytest.mark.slow) for sizes in ((1, 0), (2, 1 << 20), (2, 0))),
    ],
)
def test_a_compiled_block_is_the_block(ranks: RankPool, name: str, world: int, arena_bytes: int) -> None:
    ranks.run(check_compiled, world, name, arena_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world"), [("mlp", 1), pytest.param("block", 2, marks=pytest.mark.slow)])
def test_a_sink_outside_autograd_still_gets_the_gradients(ranks: RankPool, name: str, world: int) -> None:
    ranks.run(check_sinks_are_kept, world, name)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_is_one_graph(kind: type[ColumnParallelLinear | RowParallelLinear], bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = kind(32, 8, Communicator(None), bias=bias), torch.randn(TOKENS, 32)
    results = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer.zero_grad()
        y = run(x)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(results[1], results[0])
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_row_layers_bias_outside_autograd_still_gets_its_gradient() -> None:
    """One rank sums nothing; the gradient is the sink's all the same."""
    sink = GradientSink()
    layer = RowParallelLinear(32, 8, Communicator(None), bias=True, sink=sink)
    buffers = {parameter: torch.zeros_like(parameter) for parameter in layer.parameters()}
    sink.attach({p: (buffer, 0) for p, buffer in buffers.items()}, SimpleNamespace(contributed=lambda _: None))
    torch.compile(layer, backend="eager")(torch.ones(TOKENS, 32)).sum().backward()
    assert layer.bias is not None and layer.bias.grad is None and buffers[layer.bias].tolist() == [TOKENS] * 8
    torch._dynamo.reset()
