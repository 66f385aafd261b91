"""Copy engines: what fetches the peers' blocks while a kernel computes, and raises a flag behind each split.

`StreamCopies` is a GPU's: a stream of its own, on which a peer's shard is waited for (wait_kernels.wait_kernel, one
program), copied by cudaMemcpy, and its flag raised by copying the epoch, which lies in device memory, into the flag. So
no processor moves data, and all of it can be captured in a CUDA graph. `HostCopies` is a thread that does the same
where kernels are interpreted.

Whoever launches a kernel that waits for such a flag leaves one processor of the GPU free: wait_kernel needs a place.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from tpkernels.symmetric.signals import reached, wrapped
from tpkernels.symmetric.signals_kernel import LINE_WORDS, MISMATCH, POISON, PUBLISHED, TIMED_OUT, VERDICT_WORDS
from tpkernels.symmetric.wait_kernels import launch_wait

if TYPE_CHECKING:
    from tpkernels.exchange.device_arena import DeviceArena

_LOOKS_BETWEEN_SLEEPS = 100


@dataclass(frozen=True)
class Copy:
    """One copy, and the line of the flag that it ends with; none if nobody waits for it in a kernel."""

    source: Tensor
    target: Tensor
    line: int | None


@dataclass(frozen=True)
class Fetch:
    """What is copied once `peer` has published its block; if `peer` is this rank, at once."""

    peer: int
    copies: tuple[Copy, ...]


class Copies(Protocol):
    """One rank's copy engine."""

    def start(self, arena: DeviceArena, fetches: Sequence[Fetch], generation: int, call: int) -> None:
        """Begin to fetch, in this order, after what has been launched so far.

        Args:
            generation: whose newest call this is; the epoch is read when a copy is made, since the host does not know
                it, and the newest call may be another one by then.
            call: its number.
        """

    def join(self) -> None:
        """Have what is launched from now on come after everything that was started."""

    def reset(self) -> None:
        """Forget an error of what was started."""


class StreamCopies:
    """The copy engine of a GPU.

    Args:
        device: where the copies end.
    """

    def __init__(self, device: torch.device) -> None:
        # Before the matmul's programs where both could start.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._device = device
        # What is being copied must not be given to other tensors of the caller's stream meanwhile.
        self._under_way: list[Fetch] = []

    def start(self, arena: DeviceArena, fetches: Sequence[Fetch], generation: int, call: int) -> None:
        self._under_way += fetches
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for fetch in fetches:
                if fetch.peer != arena.rank:
                    launch_wait(arena, fetch.peer, 1, generation, call)
                for copy in fetch.copies:
                    copy.target.copy_(copy.source, non_blocking=True)
                    if copy.line is not None:
                        arena.word(copy.line * LINE_WORDS).copy_(arena.epoch_of(generation), non_blocking=True)

    def join(self) -> None:
        if not self._under_way:  # nor may a CUDA graph wait for a stream that has done nothing in it
            return
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._under_way.clear()

    def reset(self) -> None:
        self._stream.synchronize()
        self._under_way.clear()


class HostCopies:
    """A thread in the place of a copy engine, for interpreted kernels.

    Args:
        generator: shuffles the peers and delays each step at random, for tests; None: in order, at once.
        most_seconds: the longest delay.
    """

    def __init__(self, generator: random.Random | None = None, most_seconds: float = 0.0) -> None:
        self._generator, self._most_seconds = generator, most_seconds
        self._thread: ThreadPoolExecutor | None = None
        self._started: list[Future[None]] = []

    def start(self, arena: DeviceArena, fetches: Sequence[Fetch], generation: int, call: int) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="tpkernels-copies")
        ordered = list(fetches)
        if self._generator is not None:
            self._generator.shuffle(ordered)
        self._started.append(self._thread.submit(self._fetch, arena, ordered, generation, call))

    def join(self) -> None:
        for started in self._started:
            started.result()
        self._started.clear()

    def reset(self) -> None:
        wait(self._started)
        self._started.clear()

    @torch.no_grad()
    def _fetch(self, arena: DeviceArena, fetches: Sequence[Fetch], generation: int, call: int) -> None:
        for fetch in fetches:
            self._pause()
            # As late as a GPU's engine reads it.
            epoch = int(arena.epoch_of(generation))
            if fetch.peer != arena.rank and not _has_published(arena, fetch.peer, epoch, call):
                return
            for copy in fetch.copies:
                self._pause()
                copy.target.copy_(copy.source)
                self._pause()
                if copy.line is not None:
                    arena.word(copy.line * LINE_WORDS).fill_(epoch)

    def _pause(self) -> None:
        if self._generator is not None:
            time.sleep(self._generator.uniform(0, self._most_seconds))


def _has_published(arena: DeviceArena, peer: int, epoch: int, call: int) -> bool:
    """Wait as wait_kernels.wait_kernel does; False if the group is poisoned."""
    line = PUBLISHED + peer
    flag, number = arena.word(line * LINE_WORDS), arena.word(line * LINE_WORDS + 1 + (epoch & 1))
    poison = arena.word(POISON * LINE_WORDS)
    end, looks = math.inf, 0
    while not reached(int(flag), epoch):
        if int(poison):
            return False
        # The clock is read after a look at this flag, and only where that was in vain.
        now = arena.clock()
        end = now + arena.timeout_seconds if not looks else end
        if now > end:
            give_up(arena, TIMED_OUT, peer, line, epoch, int(flag), call)
            return False
        looks += 1
        os.sched_yield() if looks % _LOOKS_BETWEEN_SLEEPS else time.sleep(1e-4)
    if int(number) != call:
        give_up(arena, MISMATCH, peer, line, epoch, int(flag), call)
        return False
    return True


def give_up(arena: DeviceArena, reason: int, peer: int, line: int, epoch: int, seen: int, call: int) -> None:
    """Poison every rank's area as signals_kernel.give_up does."""
    verdict = (reason, arena.rank, peer, line, wrapped(epoch), seen, call)
    for rank in range(arena.world):
        poison = arena.control_of(rank)[POISON * LINE_WORDS :]
        if not int(poison[VERDICT_WORDS]):
            poison[VERDICT_WORDS] = 1
            for word in range(VERDICT_WORDS - 1, -1, -1):
                poison[word] = verdict[word]
