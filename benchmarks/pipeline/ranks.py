"""One rank of a contestant of the pipeline benchmark, in its own process: its time, its memory, its results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed as dist

from benchmarks.harness import resident_memory
from benchmarks.pipeline.rival import TorchSide
from benchmarks.pipeline.sides import EngineSide, SequentialSide, Side
from benchmarks.training.torch_model import Block
from tpengine.config import Config, ModelConfig
from tpengine.data import open_corpus

SideName = Literal["engine", "sequential", "torch"]
# Every rank imports all of them, so that no contestant's memory includes modules that another has imported before.
_SIDES: Mapping[str, type[Any]] = MappingProxyType(
    {"engine": EngineSide, "sequential": SequentialSide, "torch": TorchSide}
)


@dataclass(frozen=True)
class Measured:
    """A step: seconds of this rank from a common start, and its loss (-inf if this rank does not know it)."""

    seconds: float
    loss: float


class Member:
    """One rank; see tpengine.distributed.local_ranks.Ranks.

    Until `begin_timing` the resident set follows live memory, and steps are slow.
    """

    def __init__(self, kind: SideName, config: Config) -> None:
        corpus = open_corpus(config)
        _touch_libraries()
        resident_memory.follow_what_lives()
        self._before = resident_memory.resident_bytes()
        self._side: Side = _SIDES[kind](config, corpus)

    def step(self) -> Measured:
        """Run a step that begins on all ranks at once."""
        dist.barrier()
        begin = time.perf_counter()
        loss = self._side.step()
        return Measured(time.perf_counter() - begin, loss)

    def step_memory(self) -> int:
        """Run a step; return this rank's peak memory in it, minus what it held before it had a model.

        So weights, gradients, copies of weights and activations are counted.
        """
        return resident_memory.peak_of(self.step) - self._before

    def begin_timing(self) -> None:
        """Let the heap keep what is freed from here on."""
        resident_memory.keep_what_is_freed()

    def gradients(self) -> dict[str, Any]:
        """Return this rank's gradients as arrays, by tpengine's names."""
        return {name: gradient.detach().numpy() for name, gradient in self._side.gradients().items()}

    def most_live(self) -> int:
        """See Side."""
        return self._side.most_live()


def _touch_libraries() -> None:
    """Load code that torch loads late (products, attention, optimizers), because it is not a contestant's memory."""
    block = Block(ModelConfig(hidden_size=256, num_heads=4, num_kv_heads=4, ffn_size=256), 64)
    block(torch.ones(4, 64, 256)).sum().backward()
    torch.optim.AdamW(block.parameters())
