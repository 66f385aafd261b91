"""Device arenas made hostile: what ranks run that interpret the fused operators' kernels on shared memory.

As arena_ranks.py's, whose cases and answers these take. Memory of slots holds NaN until a peer has written it, every
rank dawdles before a call, and the thread in the place of the copy engine takes the peers in random order and sleeps
before each of its steps.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from torch.distributed import ProcessGroup
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.copies import HostCopies
from tpkernels.exchange.device_arena import DeviceArena

from support.kernels.precision import unwritten_is_nan
from support.ranks.arena_ranks import PATIENT_SECONDS, Case, differences


class HostileDeviceArena(DeviceArena):
    """A device arena whose slots hold NaN until they are written, and whose ranks dawdle."""

    delays: random.Random
    most_seconds: float
    used: tuple[int, bool] | None

    def begin(self, operation: str, kind: str, *what: Any) -> tuple[int, int]:
        # The generation of an ended call whose data the peers had written. They write to it again when they have heard
        # of the call that begins here. What a rank publishes itself may still be fetched by others.
        if self.used is not None and self.used[1]:
            whole = (self.generation_bytes,)
            self.block(self.rank, self.used[0], whole, torch.uint8).fill_(0xFF)
        if self.delays.random() < 0.5 / self.world:
            time.sleep(self.delays.uniform(0, self.most_seconds))
        generation, call = super().begin(operation, kind, *what)
        self.used = generation, kind != "pulls"
        return generation, call

    def reset(self, group: ProcessGroup) -> None:
        # The first call after a reset may use the generation of the one given up, and peers may write to it at once.
        self.used = None
        super().reset(group)


def kernel_communicator(
    group: ProcessGroup,
    strategy: str,
    arena_bytes: int,
    seed: int = 0,
    *,
    timeout_seconds: float = PATIENT_SECONDS,
    first_epoch: int = 0,
    most_seconds: float = 2e-3,
    reserved_processors: int = 0,
) -> Communicator:
    """A communicator whose fused operators take their kernels, over a hostile device arena.

    With strategy "fetch" it is "fused", and a kernel fetches instead of the thread. A bound that is the thing under
    test is reached by standstill.py's clock.
    """
    comm = Communicator(group, strategy="fused" if strategy == "fetch" else strategy)
    if comm.size > 1:
        arena = DeviceArena.open(
            group,
            arena_bytes,
            torch.device("cpu"),
            timeout_seconds=timeout_seconds,
            first_epoch=first_epoch,
            reserved_processors=reserved_processors,
        )
        generator = random.Random(1000 * seed + comm.rank)
        arena.__class__ = HostileDeviceArena
        assert isinstance(arena, HostileDeviceArena)
        arena.delays, arena.most_seconds, arena.used = generator, most_seconds, None
        arena.engine_bytes = 1 << 60 if strategy == "fetch" else 0
        arena.split_bytes = 1  # a flag behind each row of tiles, while there are flags
        arena.copies = HostCopies(random.Random(generator.random()), most_seconds)
        comm.device_arena = arena
    return comm


def wrong_results(comm: Communicator, cases: list[Case]) -> list[str]:
    """Where this rank's results differ from the specification; memory that nobody has written is NaN."""
    with unwritten_is_nan():
        return [wrong for case in cases if (wrong := differences(case, comm))]
