"""One rank of the blind proof: a training run in one layout at a time, and a step of it when told."""

from __future__ import annotations

import gc
import time

import torch
import torch.distributed as dist

from benchmarks.harness import resident_memory
from benchmarks.harness.allocations import Allocations
from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.doctor.measure.clock import clock_of
from tpengine.doctor.measure.products import reference_seconds
from tpengine.doctor.measure.sizes import sizes_of
from tpengine.runs.trainer import Trainer


class Member:
    """One rank; see tpengine.distributed.local_ranks.Ranks. The processes stay up from layout to layout."""

    def __init__(self) -> None:
        resident_memory.keep_what_is_freed()
        self._trainer: Trainer | None = None
        self._step = 0

    def build(self, config: Config) -> None:
        """Build a run, and take a step that does not count."""
        self._trainer = None
        gc.collect()
        self._trainer, self._step = Trainer(config, open_corpus(config), _device(config.device)), 0
        self.step()

    def step(self) -> float:
        """Return the time of a step that begins on all ranks together."""
        assert self._trainer is not None, "it was built"
        dist.barrier()
        begin = time.perf_counter()
        self._trainer.step.run(self._step)
        if torch.device(self._trainer.state.part.config.device).type == "cuda":
            torch.cuda.synchronize()
        self._step += 1
        return time.perf_counter() - begin

    def peak(self, config: Config) -> tuple[int, int]:
        """Build a run, and return its pipeline rank and the most bytes that it held in its second step."""
        self._trainer = None
        gc.collect()
        with Allocations() as counted:
            trainer = Trainer(config, open_corpus(config), _device(config.device))
            trainer.step.run(0)
            with counted.here():
                trainer.step.run(1)
        return trainer.state.rank.mesh.at.pp, counted.peak_bytes()

    def reference(self, device: str, dtype: str) -> list[float]:
        """Return the seconds of the products of reference, which all ranks multiply at the same time."""
        sizes = sizes_of(device)
        clock = clock_of(_device(device), sizes.seconds, sizes.evicting_bytes)
        return reference_seconds(clock, getattr(torch, dtype), sizes.references)


def _device(kind: str) -> torch.device:
    """Return the device of the only rank on a GPU; tensors of a step name it with its number."""
    return torch.device("cuda", 0) if kind == "cuda" else torch.device(kind)
