"""What tests of data parallelism for any module share: a model in which not every parameter takes part."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tpkernels.exchange.communicator import Communicator


def world() -> Communicator:
    """All ranks."""
    return Communicator(dist.group.WORLD)


class Odd(nn.Module):
    """Shared, frozen, unused and sometimes used parameters; `route` says which branches a sample takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.unused = nn.Linear(6, 6)
        self.body = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.branch = nn.Linear(6, 6)
        self.rare = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, route: str) -> Tensor:
        x = self.frozen(torch.tanh(self.body(self.embed(tokens))))
        if "branch" in route:
            x = x + self.branch(x)
        if "rare" in route:
            x = x * self.rare
        return nn.functional.cross_entropy(self.head(x), tokens.roll(1))


def odd_model(seed: int) -> Odd:
    torch.manual_seed(seed)
    return Odd().double()


def tokens_of(rank: int, step: int) -> Tensor:
    return torch.randint(11, (9,), generator=torch.Generator().manual_seed(100 * step + rank))
