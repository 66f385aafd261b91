"""Rung: gloo ranks. inference_mode, no_grad and training take turns over the same layers, tables, caches and arenas.

The order is drawn. After every turn a layer computes what one computes that has never been used before; nothing that
a turn leaves behind keeps a later one from reading, writing or training.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.ranks.rank_pool import RankPool
from torch import Tensor, nn
from tpkernels.exchange.communicator import Communicator

from tpengine.layers import Attention, KeyValueCache, RMSNorm, SwiGLU, VocabParallelEmbedding
from tpengine.layers.scores import tables_of
from tpengine.model.exact import ExactMatmuls, Shards, collect

D, SEQ, T = 16, 8, 16
TURNS = ("train", "no_grad", "inference", "prepare", "prepare in inference", "moved", "decode", "written")


class Model(nn.Module):
    """A block with a table, its attention computed as in exact mode or not."""

    def __init__(self, comm: Communicator, exact: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding = VocabParallelEmbedding(8, D, comm, dtype=torch.float64)
        self.norm = RMSNorm(D, comm, dtype=torch.float64)
        self.attention = exact_attention(comm) if exact else Attention(D, 4, 4, comm, dtype=torch.float64)
        self.mlp = SwiGLU(D, 24, comm, dtype=torch.float64)

    def forward(self, tokens: Tensor, rows: int | KeyValueCache = SEQ) -> Tensor:
        """tokens[T] -> y[T/tp, D]."""
        x = self.norm(self.embedding(tokens))
        y: Tensor = self.mlp(x + self.attention(x, rows))
        return y

    def each(self, call: str, *arguments: int) -> None:
        """Call a method of the layers that have prepared weights."""
        for layer in (self.attention, self.mlp):
            getattr(layer, call)(*arguments)


def exact_attention(comm: Communicator) -> ExactMatmuls:
    """Four shards, of which two share a KV head."""
    shards = Shards(comm, 4)
    layers = [
        Attention(D, 4, 2, shards.ranks_of(v), replicas=shards.replicas_of(v, 2), dtype=torch.float64)
        for v in shards.held
    ]
    return ExactMatmuls(shards, layers, collect)


def decoded(model: Model, tokens: Tensor, modes: tuple[Callable[[], object], ...]) -> Tensor:
    """All tokens of each sequence in two passes on a cache, each in a mode of its own."""
    cache, found = KeyValueCache(SEQ, [SEQ // 2] * 2), []
    for half, mode in zip(tokens.view(2, 2, SEQ // 2).unbind(1), modes, strict=True):
        cache.follow(SEQ // 2)
        with mode():  # type: ignore[attr-defined]
            found.append(model(half.flatten(), cache).clone())
    return torch.cat(found)


def take(turn: str, model: Model, tokens: Tensor, draw: random.Random) -> list[Tensor]:
    """Take a turn, and return what it computes; turns that only change something compute nothing."""
    if turn == "train":
        model.zero_grad()
        y = model(tokens)
        y.square().sum().backward()
        return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    if turn == "decode":
        modes = [torch.no_grad, torch.inference_mode]
        draw.shuffle(modes)
        return [decoded(model, tokens, tuple(modes))]
    if turn in ("no_grad", "inference"):
        with torch.no_grad() if turn == "no_grad" else torch.inference_mode():
            return [model(tokens)]
    if turn == "written":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0)
    elif turn == "moved":
        model.float()
        model.double()
    else:
        with torch.inference_mode(turn != "prepare"):
            model.each("prepare", T)
    return []


def turns(seed: int, exact: bool, arena_bytes: int) -> None:
    comm = Communicator(dist.group.WORLD, arena_bytes=arena_bytes)
    draw = random.Random(seed)
    tokens = torch.arange(T) * 5 % 8
    tables_of.cache_clear()
    used = Model(comm, exact)
    # One that has been moved has rounded weights.
    weights = {name: value.float().double() for name, value in used.state_dict().items()}
    used.load_state_dict(weights)
    first = draw.choice(("inference", "prepare in inference", "decode"))
    order = [first, *draw.choices(TURNS, k=6), "train"]
    for number, turn in enumerate(order):
        found = take(turn, used, tokens, draw)
        fresh = Model(comm, exact)
        fresh.load_state_dict(weights)
        want = take(turn, fresh, tokens, draw)
        assert len(found) == len(want)
        for got, wanted in zip(found, want, strict=True):
            assert torch.allclose(got, wanted, rtol=1e-12, atol=1e-12), (order[: number + 1], turn)


def check(seeds: range, arena_bytes: int) -> None:
    for seed in seeds:
        turns(seed, exact=seed % 3 == 0, arena_bytes=arena_bytes)


@pytest.mark.by_default("2-1048576-seeds1")
@pytest.mark.parametrize(
    ("world", "arena_bytes", "seeds"),
    [
        (1, 0, range(12)),
        (2, 1 << 20, range(3)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 0, range(12, 150)), (2, 0, range(30)))),
    ],
)
def test_modes_take_turns_in_any_order(ranks: RankPool, world: int, arena_bytes: int, seeds: range) -> None:
    ranks.run(check, world, seeds, arena_bytes)
