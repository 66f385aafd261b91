"""One rank of a contestant of the data-parallel benchmark, in its own process.

All contestants train the same plain transformer, with the same weights, batches and fused AdamW. After the checked
steps each weight's change must be that of one process that trains on the batches of all replicas.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from tpkernels.exchange.communicator import Communicator

from benchmarks.data_parallel.options import CHECKED_STEPS, Options
from benchmarks.harness import resident_memory
from tpengine.modules import DataParallel, ShardedOptimizer

# Of a weight's largest change. The order of sums explains less than 1e-4.
_TOLERANCE = 1e-3
_VOCABULARY = 256
# Sums go through it in pieces.
_ARENA_BYTES = 4_000_000

Weights = dict[str, Tensor]


class Model(nn.Module):
    """A plain transformer of torch's own layers; returns the loss."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(_VOCABULARY, options.hidden)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                options.hidden, 8, 4 * options.hidden, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(options.layers)
        )
        self.head = nn.Linear(options.hidden, _VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of predicting each token's left neighbour."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())


class Member:
    """One rank; see tpengine.distributed.local_ranks.Ranks.

    Until `begin_timing` the resident set follows live memory, and steps are slow.

    Args:
        name: of the contestant, see command.py.
        options: sizes.
    """

    def __init__(self, name: str, options: Options) -> None:
        # This also loads the code that torch loads late, which is no contestant's memory.
        self._before, self._after = one_process(options)
        resident_memory.follow_what_lives()
        self._held = resident_memory.resident_bytes()
        self._batches = [batch_of(options, m, dist.get_rank()) for m in range(options.micro_batches)]
        self._finish: Callable[[], object] = lambda: None
        self._only_add: Callable[[], Any] = contextlib.nullcontext
        self._model: nn.Module = Model(options)
        if name.startswith("ddp"):
            self._be_ddp(shard_states=name == "ddp_zero")
        else:
            self._be_ours(name.startswith("sharded"), _ARENA_BYTES if name.endswith("_memory") else 0)

    def _be_ours(self, shard_states: bool, arena_bytes: int) -> None:
        replicas = Communicator(dist.group.WORLD, arena_bytes=arena_bytes)
        parallel = DataParallel(self._model, replicas)
        self._optimizer = (
            ShardedOptimizer(torch.optim.AdamW, self._model.parameters(), replicas, **_OPTIONS)
            if shard_states
            else adamw(self._model.parameters())
        )
        self._finish, self._only_add = parallel.finish, parallel.no_sync

    def _be_ddp(self, *, shard_states: bool) -> None:
        model = DistributedDataParallel(self._model, gradient_as_bucket_view=True)
        self._optimizer = (
            ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **_OPTIONS)
            if shard_states
            else adamw(model.parameters())
        )
        self._model, self._only_add = model, model.no_sync

    def step(self) -> float:
        """Run a step that begins on all ranks at once; return this rank's seconds."""
        dist.barrier()
        begin = time.perf_counter()
        self._optimizer.zero_grad()
        for number, tokens in enumerate(self._batches, 1):
            with contextlib.nullcontext() if number == len(self._batches) else self._only_add():
                (self._model(tokens) / len(self._batches)).backward()
        self._finish()
        self._optimizer.step()
        return time.perf_counter() - begin

    def wrong(self) -> str:
        """Return which weight is not as in one process after the checked steps; empty if none; collective."""
        got = {name.removeprefix("module."): p.detach().clone() for name, p in self._model.named_parameters()}
        return difference(got, self._before, self._after)

    def step_memory(self) -> int:
        """Run a step; return this rank's peak memory in it, minus what it held before it had a model."""
        return resident_memory.peak_of(self.step) - self._held

    def begin_timing(self) -> None:
        """Let the heap keep what is freed from here on."""
        resident_memory.keep_what_is_freed()


# With a small eps the first update is the gradient's sign, and rounding would change a weight by as much as training.
_OPTIONS: dict[str, Any] = {"lr": 1e-3, "eps": 1e-3, "fused": True}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of every contestant."""
    return torch.optim.AdamW(parameters, **_OPTIONS)


def batch_of(options: Options, microbatch: int, rank: int) -> Tensor:
    """Return a replica's tokens of one micro-batch, the same in every step."""
    generator = torch.Generator().manual_seed(microbatch * options.ranks + rank)
    return torch.randint(_VOCABULARY, (options.sequences, options.tokens), generator=generator)


def one_process(options: Options) -> tuple[Weights, Weights]:
    """Return the weights before and after the checked steps on the batches of all replicas."""
    model = Model(options)
    optimizer = adamw(model.parameters())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    pieces = [batch_of(options, m, rank) for m in range(options.micro_batches) for rank in range(options.ranks)]
    for _ in range(CHECKED_STEPS):
        optimizer.zero_grad()
        for tokens in pieces:
            (model(tokens) / len(pieces)).backward()
        optimizer.step()
    return before, {name: p.detach().clone() for name, p in model.named_parameters()}


def difference(got: Weights, before: Weights, after: Weights) -> str:
    """Return which weight has changed otherwise than in one process; empty if none."""
    if got.keys() != after.keys():
        return f"weights are {sorted(got.keys() ^ after.keys())}"
    for name, value in after.items():
        worst, largest = float((got[name] - value).abs().max()), float((value - before[name]).abs().max())
        if not (largest > 0 and worst <= _TOLERANCE * largest):
            return f"{name} is off by {worst:g}, its largest change is {largest:g}"
    return ""
