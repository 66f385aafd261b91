"""Time for ranks that share memory: it passes only while every rank waits and nothing is left that one could still see.

A bound in seconds says of a busy machine that a peer stayed away. Here a rank that polls writes down the state of all
control areas that it has polled in vain. Where all ranks have written the state that there is now, nobody will ever
move: that is a proof, not a limit, and from then on clocks jump and polls are counted. A rank that is to stay away, or
has ended what it was to do, says so (`leave`).
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from tpkernels import signals_kernel
from tpkernels.arena import Arena
from tpkernels.device_arena import CONTROL_BYTES, DeviceArena
from tpkernels.signals import control_bytes
from tpkernels.signals_kernel import LIMIT, LINE_WORDS, STATE
from tpkernels.symmetric import HostMemory

# More than any bound of a test.
JUMP_SECONDS = 1e6
# Of a kernel's wait, each after something came or at a standstill.
MOST_POLLS = 1000
_SLEEP_SECONDS = 1e-4
_BUSY, _GONE = 0, -1
# Who waits, of a rank: its main thread, and the thread in the place of its copy engine.
_RANK, _COPIES = 0, 1


class Standstill:
    """Lets time pass for one arena of this rank; a context manager, around the calls that may wait.

    Args:
        arena: on a host's memory. Its ranks must all be inside, or have left.
        group: its ranks. To make one is collective.
    """

    def __init__(self, arena: Arena | DeviceArena, group: ProcessGroup) -> None:
        self._arena, self._rank = arena, arena.rank
        memory = arena.memory
        assert isinstance(memory, HostMemory), "GPUs have a clock of their own"
        size = control_bytes(arena.world) if isinstance(arena, Arena) else CONTROL_BYTES
        self._areas = [memory.bytes_of(rank, 0, size) for rank in range(arena.world)]
        self._memory = HostMemory.allocate(group, 16)
        self._board = [self._memory.bytes_of(rank, 0, 16).cast("B").cast("q") for rank in range(arena.world)]
        self._board[self._rank][_COPIES] = _GONE
        self._seen = [0, 0]
        self._polled_own = 0
        self._now = 0.0
        self._num_fetches, self._lock = 0, threading.Lock()
        dist.barrier(group)

    def leave(self) -> None:
        """This rank does nothing any more that another could wait for."""
        self._board[self._rank][_RANK] = _GONE

    def __enter__(self) -> Standstill:
        self._board[self._rank][_RANK] = _BUSY
        arena = self._arena
        if isinstance(arena, Arena):
            self._before: Any = arena.signals.clock
            arena.signals.clock = self._clock_of(_RANK)
        else:
            self._before = signals_kernel._rest, arena.clock, int(self._limit)
            signals_kernel._rest, arena.clock = self._rest, self._clock_of(_COPIES)
            self._limit.fill_(MOST_POLLS)
            start = arena.copies.start
            arena.copies.start = lambda *args: self._start(start, *args)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        arena = self._arena
        if isinstance(arena, Arena):
            arena.signals.clock = self._before
        else:
            signals_kernel._rest, arena.clock, limit = self._before
            self._limit.fill_(limit)
            del arena.copies.start  # type: ignore[method-assign]
        self.leave()

    def is_still(self) -> bool:
        """Whether nobody moves any more. A rank that watches the others has left."""
        return self._is_still(self._state()[1])

    @property
    def _limit(self) -> Any:
        assert isinstance(self._arena, DeviceArena)
        return self._arena.word(STATE * LINE_WORDS + LIMIT)

    def _state(self) -> tuple[int, int]:
        """Of this rank's control area, and of all ranks'; never 0 or less."""
        each = [zlib.crc32(area) + 1 for area in self._areas]
        return each[self._rank], zlib.crc32(repr(each).encode()) + 1

    def _is_still(self, state: int) -> bool:
        every = [word for board in self._board for word in board[: _COPIES + 1].tolist()]
        return all(word in (state, _GONE) for word in every)

    def _clock_of(self, waiter: int) -> Callable[[], float]:
        """A clock for a loop that reads it once between two polls of whatever control area."""

        def now() -> float:
            _, state = self._state()
            if state == self._seen[waiter]:  # and has polled since
                self._board[self._rank][waiter] = state
            self._seen[waiter] = state
            self._now += JUMP_SECONDS if self._is_still(state) else 0.0
            return self._now

        return now

    def _rest(self) -> None:
        """Between two polls of an interpreted kernel, of its own control area: until there is something to see."""
        time.sleep(0)
        own, state = self._state()
        while own == self._polled_own:
            self._board[self._rank][_RANK] = state
            # The copy engine's thread names the peer that it waits for, before the kernel names the copy.
            if self._is_still(state) and not self._num_fetches:
                return
            time.sleep(_SLEEP_SECONDS)
            own, state = self._state()
        self._polled_own = own

    def _start(self, start: Callable[..., None], arena: DeviceArena, fetches: Sequence[Any], *rest: Any) -> None:
        """A copy engine that has something to do is busy, until it waits as well."""
        with self._lock:
            self._num_fetches += 1
            self._board[self._rank][_COPIES] = _BUSY
        start(arena, fetches, *rest)
        started: Future[None] = arena.copies._started[-1]  # type: ignore[attr-defined]
        started.add_done_callback(self._end)

    def _end(self, _: Future[None]) -> None:
        with self._lock:
            self._num_fetches -= 1
            if not self._num_fetches:
                self._board[self._rank][_COPIES] = _GONE
