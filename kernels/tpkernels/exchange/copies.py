"""Copy engines: fetch the peers' blocks while a kernel computes, and raise a flag after each split.

`StreamCopies` is the copy engine of a GPU. On a stream of its own it waits for a peer's shard (one program of
wait_kernels.wait_kernel), copies it by cudaMemcpy, and raises its flag by copying the epoch, which lies in device
memory, into the flag. So no processor of the GPU moves data, and everything can be captured in a CUDA graph.
`HostCopies` is a thread that does the same for interpreted kernels.

Each copy, and each wait, costs the host about as much as a launch. So small shards are fetched by one kernel on the
same stream instead (gather_kernel.fetch_kernel).

A kernel that waits for such a flag must leave room for wait_kernel or fetch_kernel (tpkernels/processors.py).
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tpkernels.symmetric.signals import reached, wrapped
from tpkernels.symmetric.signals_kernel import LINE_WORDS, MISMATCH, POISON, PUBLISHED, TIMED_OUT, VERDICT_WORDS
from tpkernels.symmetric.wait_kernels import ControlArea, launch_wait

_LOOKS_BETWEEN_SLEEPS = 100


@dataclass(frozen=True)
class Copy:
    """One copy, and the line of the flag to raise after it; None if no kernel waits for it."""

    source: Tensor
    target: Tensor
    line: int | None


@dataclass(frozen=True)
class Fetch:
    """The copies to make once `peer` has published its block; if `peer` is this rank, at once."""

    peer: int
    copies: tuple[Copy, ...]


class CopiedArea(ControlArea, Protocol):
    """What a copy engine needs of its rank's arena: CopiedArea says what each is."""

    @property
    def rank(self) -> int: ...

    @property
    def timeout_seconds(self) -> float: ...

    @property
    def clock(self) -> Callable[[], float]: ...

    def control_of(self, rank: int) -> Tensor: ...

    def word(self, index: int) -> Tensor: ...

    def epoch_of(self, generation: int) -> Tensor: ...


class Copies(Protocol):
    """One rank's copy engine."""

    def start(self, arena: CopiedArea, fetches: Sequence[Fetch], generation: int, call: int) -> None:
        """Begin to fetch, in this order, after everything that has been launched so far.

        Args:
            generation: generation of the call; its epoch is read when a copy is made, since the host does not know it.
            call: number of the call.
        """

    def launch(self, kernel: Callable[[], None], target: Tensor) -> None:
        """Launch a kernel that copies, into `target`, after everything that has been launched so far."""

    def join(self) -> None:
        """Let everything that is launched from now on run after all started copies."""

    def reset(self) -> None:
        """Wait for all started copies and discard their errors."""


class StreamCopies:
    """The copy engine of a GPU.

    Args:
        device: where the copies end.
    """

    def __init__(self, device: torch.device) -> None:
        # High priority: wait_kernel must start before the matmul's programs.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._device = device
        # Keep the tensors alive: their memory must not be reused on the caller's stream while they are copied.
        self._under_way: list[Fetch | Tensor] = []

    def start(self, arena: CopiedArea, fetches: Sequence[Fetch], generation: int, call: int) -> None:
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

    def launch(self, kernel: Callable[[], None], target: Tensor) -> None:
        self._under_way.append(target)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            kernel()

    def join(self) -> None:
        if not self._under_way:  # a CUDA graph must not wait for a stream that has done nothing in it
            return
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._under_way.clear()

    def reset(self) -> None:
        self._stream.synchronize()
        self._under_way.clear()


class HostCopies:
    """A thread that takes the place of a copy engine, for interpreted kernels.

    Args:
        generator: for tests: shuffles the peers and delays each step at random; None: in order, without delay.
        most_seconds: the longest delay.

    Attributes:
        started: the copies that were started since the last `join`.
    """

    def __init__(self, generator: random.Random | None = None, most_seconds: float = 0.0) -> None:
        self._generator, self._most_seconds = generator, most_seconds
        self._thread: ThreadPoolExecutor | None = None
        self.started: list[Future[None]] = []

    def start(self, arena: CopiedArea, fetches: Sequence[Fetch], generation: int, call: int) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="tpkernels-copies")
        ordered = list(fetches)
        if self._generator is not None:
            self._generator.shuffle(ordered)
        self.started.append(self._thread.submit(self._fetch, arena, ordered, generation, call))

    def launch(self, kernel: Callable[[], None], target: Tensor) -> None:
        # The interpreter has no threads, so the kernel runs now. It waits only for what peers publish before theirs.
        kernel()

    def join(self) -> None:
        for started in self.started:
            started.result()
        self.started.clear()

    def reset(self) -> None:
        wait(self.started)
        self.started.clear()

    @torch.no_grad()
    def _fetch(self, arena: CopiedArea, fetches: Sequence[Fetch], generation: int, call: int) -> None:
        for fetch in fetches:
            self._pause()
            # Read the epoch as late as a GPU's engine does.
            epoch = int(arena.epoch_of(generation))
            if fetch.peer != arena.rank and not has_published(arena, fetch.peer, epoch, call):
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


def has_published(arena: CopiedArea, peer: int, epoch: int, call: int) -> bool:
    """Wait as wait_kernels.wait_kernel does; return False if the group is poisoned."""
    line = PUBLISHED + peer
    flag, number = arena.word(line * LINE_WORDS), arena.word(line * LINE_WORDS + 1 + (epoch & 1))
    poison = arena.word(POISON * LINE_WORDS)
    end, looks = math.inf, 0
    while not reached(int(flag), epoch):
        if int(poison):
            return False
        # Read the clock after looking at the flag, and only if it was not raised.
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


def give_up(arena: CopiedArea, reason: int, peer: int, line: int, epoch: int, seen: int, call: int) -> None:
    """Poison the control areas of all ranks, as signals_kernel.give_up does."""
    verdict = (reason, arena.rank, peer, line, wrapped(epoch), seen, call)
    for rank in range(arena.world):
        poison = arena.control_of(rank)[POISON * LINE_WORDS :]
        if not int(poison[VERDICT_WORDS]):
            poison[VERDICT_WORDS] = 1
            for word in range(VERDICT_WORDS - 1, -1, -1):
                poison[word] = verdict[word]
