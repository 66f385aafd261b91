"""What tests of zero 1 to 3 share: a stack of layers of which not every one takes part, and its training."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.engine.odd_module import tokens_of
from tpengine.data_parallel import DataParallel
from tpengine.layers.collectives import Communicator

STEPS = 3

Weights = dict[str, Tensor]


class Layer(nn.Module):
    """Two matmuls and a norm, which sees the same weights twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 7), nn.Linear(7, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Stacked(nn.Module):
    """A stack with frozen, skipped, repeated and recomputed layers, tied ends and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.layers[1].requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.branch = Layer()
        self.rare = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, route: str) -> Tensor:
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            if "skip" in route and i == 2:
                continue
            x = checkpoint(layer, x, use_reentrant=False) if "again" in route else layer(x)
        if "segment" in route:
            x = checkpoint(self.two_last, x, use_reentrant=False)
        if "branch" in route:
            x = self.branch(self.branch(x))
        if "rare" in route:
            x = x * self.rare
        return nn.functional.cross_entropy(self.head(x), tokens.roll(1))

    def two_last(self, x: Tensor) -> Tensor:
        y: Tensor = self.branch(self.layers[3](x))
        return y


def stacked(seed: int, dtype: torch.dtype = torch.float64) -> Stacked:
    torch.manual_seed(seed)
    return Stacked().to(dtype)


def routes(rank: int, num_ranks: int, step: int) -> list[str]:
    """Return what a replica computes in a step: one entry per micro-batch."""
    last = rank == num_ranks - 1
    return [
        ["again", "branch skip" if last else "segment"],
        ["rare branch"] if rank == 0 else ["skip", "again"],
        [] if last else ["again branch", "skip"],
    ][step]


def batch(rank: int, step: int, microbatch: int) -> Tensor:
    return tokens_of(rank, 10 * step + microbatch)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer whose step, unlike Adam's, sees how large a gradient is."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def reference(
    num_ranks: int, num_steps: int = STEPS, optimizer_of: Callable[..., torch.optim.Optimizer] = sgd
) -> tuple[list[list[str]], Weights]:
    """Train in one process; return the parameters without gradient, by step, and the weights in the end."""
    model = stacked(0)
    optimizer = optimizer_of(p for p in model.parameters() if p.requires_grad)
    without = []
    for step in range(num_steps):
        optimizer.zero_grad()
        for rank in range(num_ranks):
            for i, route in enumerate(routes(rank, num_ranks, step)):
                (model(batch(rank, step, i), route) / num_ranks).backward()
        without.append([name for name, p in model.named_parameters() if p.requires_grad and p.grad is None])
        optimizer.step()
    return without, weights_of(model)


def train(
    zero: int, num_steps: int = STEPS, change: Callable[[DataParallel], None] | None = None, arena_bytes: int = 0
) -> tuple[list[list[str]], Weights]:
    """Train the same on replicas; return the same."""
    comm = Communicator(dist.group.WORLD, arena_bytes=arena_bytes)
    model = stacked(comm.rank)  # rank 0's values are broadcast
    replicas = DataParallel(model, comm, 500, zero=zero)
    if change is not None:
        change(replicas)
    optimizer = sgd(replicas.parameters())
    without = []
    for step in range(num_steps):
        mine = routes(comm.rank, comm.size, step)
        for i, route in enumerate(mine):
            if i < len(mine) - 1:
                with replicas.no_sync():
                    model(batch(comm.rank, step, i), route).backward()
            else:
                model(batch(comm.rank, step, i), route).backward()
        replicas.finish()
        without.append([name for name, p in replicas.named_parameters() if p.grad is None])
        with torch.no_grad():
            model(batch(0, 99, 0), "")  # between finish and the step: it must not hide the step
        optimizer.step()
        optimizer.zero_grad()
    with replicas.whole():
        weights = weights_of(model)
    replicas.remove()
    return without, weights


def weights_of(model: nn.Module) -> Weights:
    return {name: value.clone() for name, value in model.state_dict().items()}
