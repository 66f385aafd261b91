"""Rung: gloo ranks. Copies of tensor-parallel modules: an average of the weights, and what a copy shares."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn
from tpkernels.exchange.communicator import Communicator

from tpengine.layers import RMSNorm, SwiGLU
from tpengine.layers.gradient_sink import DeferringSink, GradientSink, WeightHalves

D, FFN, T, STEPS, DECAY = 12, 24, 8, 3, 0.75


def tensor(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def model_of(comm: Communicator) -> nn.Sequential:
    """A norm and an MLP, whose global weights are the same however many ranks hold them."""
    model = nn.Sequential(RMSNorm(D, comm, dtype=torch.float64), SwiGLU(D, FFN, comm, dtype=torch.float64))
    shapes = {"1.gate_proj.weight": (FFN, D), "1.up_proj.weight": (FFN, D), "1.down_proj.weight": (D, FFN)}
    with torch.no_grad():
        for seed, (name, shape) in enumerate(shapes.items()):
            parts = tensor(seed, *shape).chunk(comm.size, dim=1 if "down" in name else 0)
            model.get_parameter(name).copy_(parts[comm.rank])
    return model


def averages(comm: Communicator) -> tuple[dict[str, Tensor], Tensor]:
    """This rank's averaged weights after some steps of gradient descent, and what the averaged model says."""
    model = model_of(comm)
    average = copy.deepcopy(model)
    for step in range(STEPS):
        x = tensor(10 + step, T, D).chunk(comm.size)[comm.rank]
        model.zero_grad()
        model(x).square().sum().backward()
        with torch.no_grad():
            for parameter, kept in zip(model.parameters(), average.parameters(), strict=True):
                parameter -= 1e-4 * parameter.grad
                kept.lerp_(parameter, 1 - DECAY)
    assert not any(p.data_ptr() == q.data_ptr() for p, q in zip(model.parameters(), average.parameters(), strict=True))
    assert all(p.grad is None for p in average.parameters())
    with torch.no_grad():
        y = average(tensor(9, T, D).chunk(comm.size)[comm.rank])
    return {name: p.detach() for name, p in average.named_parameters()}, y


def check_average() -> None:
    """The average of each rank's shards is the shard of the average of global weights."""
    comm = Communicator(dist.group.WORLD, arena_bytes=1 << 16)
    mine, y = averages(comm)
    whole, whole_y = averages(Communicator(None))
    for name, value in whole.items():
        parts = [value] * comm.size if value.dim() == 1 else value.chunk(comm.size, dim=1 if "down" in name else 0)
        torch.testing.assert_close(mine[name], parts[comm.rank], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(y, whole_y.chunk(comm.size)[comm.rank], rtol=1e-12, atol=1e-12)


def test_an_average_of_a_models_weights(ranks: RankPool) -> None:
    ranks.run(check_average, 2)


def test_the_average_by_hand() -> None:
    """The average over plain tensors on one rank is the one computed by hand."""
    weights = [torch.ones(D, dtype=torch.float64), tensor(0, FFN, D), tensor(1, FFN, D), tensor(2, D, FFN)]
    kept = [w.clone() for w in weights]
    for step in range(STEPS):
        leaves = [w.requires_grad_() for w in weights]
        norm, gate, up, down = leaves
        x = nn.functional.rms_norm(tensor(10 + step, T, D), (D,), norm, 1e-5)
        y = (nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        grads = torch.autograd.grad(y.square().sum(), leaves)
        weights = [w.detach() - 1e-4 * g for w, g in zip(leaves, grads, strict=True)]
        kept = [DECAY * k + (1 - DECAY) * w for k, w in zip(kept, weights, strict=True)]
    averaged, _ = averages(Communicator(None))
    for wanted, found in zip(kept, averaged.values(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_a_copys_gradients_are_its_own() -> None:
    """The original's gradients go to its sink; buffers, buckets and prepared weights are not copied."""
    comm, told = Communicator(None), []
    halves = WeightHalves()
    for sink in (GradientSink(), DeferringSink(GradientSink(), halves)):
        layer = SwiGLU(D, FFN, comm, sink=sink)
        layer.prepare(T)
        inner = sink.inner if isinstance(sink, DeferringSink) else sink
        inner.attach(
            {p: (torch.zeros_like(p), 0) for p in layer.parameters()}, SimpleNamespace(contributed=told.append)
        )
        copied = copy.deepcopy(layer)
        assert copied.gate_proj.sink.is_autograds and copied._gate_up._prepared is None
        x = torch.randn(T, D)
        torch.testing.assert_close(copied(x), layer(x))
        copied(x).sum().backward()
        assert not told and all(p.grad is not None for p in copied.parameters())
        assert all(p.grad is None for p in layer.parameters())
