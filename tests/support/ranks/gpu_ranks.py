"""Ranks that share one GPU, fused operators over a hostile arena there, their results held to the specification.

A case of each check is small and interpreted, so that it runs everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.copies import CopiedArea, Fetch, StreamCopies
from tpkernels.exchange.device_arena import DeviceArena
from tpkernels.exchange.stream_waits import Waits

from support.kernels.precision import unwritten_is_nan
from support.ranks.arena_ranks import PATIENT_SECONDS, Case, Inputs, expected, inputs_of, results
from support.ranks.kernel_ranks import HostileDeviceArena, kernel_communicator

ROOMY = 1 << 18
# At most; of a GPU that runs at 1.7 GHz not a millisecond.
DELAY_CYCLES = 1_000_000

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def rungs(names: str, interpreted: tuple[Any, ...], *compiled: tuple[Any, ...]) -> pytest.MarkDecorator:
    """Parametrize `device`, and these names: by one small case that is interpreted, and by those of a GPU."""
    on_gpu = [pytest.param("cuda", *values, marks=needs_gpu) for values in compiled]
    return pytest.mark.parametrize(f"device, {names}", [("cpu", *interpreted), *on_gpu])


Run = Callable[..., list[Any]]


class LateArena(HostileDeviceArena):
    """A hostile arena whose device dawdles too before a call."""

    def begin(self, operation: str, kind: str, *what: Any) -> tuple[int, int]:
        if self.delays.random() < 0.5:
            torch.cuda._sleep(self.delays.randrange(DELAY_CYCLES))
        return super().begin(operation, kind, *what)


class LateCopies(StreamCopies):
    """A copy engine that begins late, when kernels wait for it and other memory may have been given away."""

    def __init__(self, device: torch.device, generator: random.Random) -> None:
        super().__init__(device)
        self._generator = generator

    def start(self, arena: CopiedArea, fetches: Sequence[Fetch], generation: int, call: int) -> None:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(self._generator.randrange(DELAY_CYCLES))
        super().start(arena, fetches, generation, call)


def hostile(
    device: str,
    strategy: str,
    arena_bytes: int,
    seed: int = 0,
    *,
    group: ProcessGroup | None = None,
    timeout_seconds: float = PATIENT_SECONDS,
    first_epoch: int = 0,
    waits: Waits = "kernels",
) -> Communicator:
    """A communicator whose fused operators take their kernels, over a hostile device arena of this device."""
    group = dist.group.WORLD if group is None else group
    times = {"timeout_seconds": timeout_seconds, "first_epoch": first_epoch}
    if device == "cpu":
        return kernel_communicator(group, strategy, arena_bytes, seed, **times)  # type: ignore[arg-type]
    comm = Communicator(group, strategy=strategy)
    place = torch.device(device, 0)
    arena = DeviceArena.open(group, arena_bytes, place, waits=waits, **times)  # type: ignore[arg-type]
    generator = random.Random(1000 * seed + comm.rank)
    arena.__class__ = LateArena
    assert isinstance(arena, LateArena)
    arena.delays, arena.most_seconds, arena.used = generator, 2e-3, None
    arena.engine_bytes = 0
    arena.split_bytes = 1  # a flag behind each row of tiles, while there are flags
    arena.copies = LateCopies(place, random.Random(generator.random()))
    comm.device_arena = arena
    return comm


def moved(device: str, inputs: Inputs) -> Inputs:
    """The same inputs on a device, with the gaps that they have."""

    def move(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t)

    return Inputs(move(inputs.x), *([move(t) for t in many] for many in (inputs.weights, inputs.biases, inputs.dys)))


def settle(comm: Communicator) -> None:
    """Wait for the device, and raise what a kernel has to say."""
    assert comm.device_arena is not None
    if comm.device_arena.control.is_cuda:
        torch.cuda.synchronize()
    comm.device_arena.check()


def wrong_results(device: str, comm: Communicator, many: Sequence[Case]) -> list[str]:
    """Where this rank's results differ from the specification. All calls are made before any result is looked at."""
    with unwritten_is_nan():
        everything = [results(case, comm, moved(device, inputs_of(case, comm.rank, comm.size))) for case in many]
    settle(comm)
    found = []
    for case, got in zip(many, everything, strict=True):
        wrong = [i for i, same in enumerate(agreements(got, expected(case, comm.rank, comm.size))) if not same]
        found += [f"rank {comm.rank} of {comm.size}: results {wrong} of {case}"] if wrong else []
    return found


def agreements(got: Sequence[Tensor], want: Sequence[Tensor]) -> list[bool]:
    return [a.dtype == b.dtype and torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True)]
