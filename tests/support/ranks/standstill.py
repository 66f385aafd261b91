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
from tpkernels.exchange.arena import Arena
from tpkernels.exchange.device_arena import CONTROL_BYTES, DeviceArena
from tpkernels.symmetric import signals_kernel
from tpkernels.symmetric.device_clock import NS_PER_SECOND
from tpkernels.symmetric.memory import HostMemory
from tpkernels.symmetric.signals import control_bytes

# More than any bound of a test.
JUMP_SECONDS = 1e6
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
        self._seen, self._same = [0, 0], [0, 0]
        self._now = 0.0
        self._num_fetches, self._lock = 0, threading.Lock()
        self._joins = False
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
            self._before = signals_kernel._now_ns, arena.clock
            of_kernels = self._clock_of(_RANK)
            # From the first one on numbers of 64 bits: the interpreter keeps the type of a wait's first look.
            signals_kernel._now_ns = lambda: 2**40 + int(of_kernels() * NS_PER_SECOND)
            arena.clock = self._clock_of(_COPIES)
            start = arena.copies.start
            arena.copies.start = lambda *args: self._start(start, *args)  # type: ignore[method-assign]
            join = arena.copies.join
            arena.copies.join = lambda: self._join(join)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        arena = self._arena
        if isinstance(arena, Arena):
            arena.signals.clock = self._before
        else:
            signals_kernel._now_ns, arena.clock = self._before
            del arena.copies.start, arena.copies.join
        self.leave()

    def until_others_wait(self) -> None:
        """Keep this rank back until every other one waits in vain or has left; for them no time passes meanwhile."""
        own = self._board[self._rank]
        while True:
            state = self.state()
            if all(word in (state, _GONE) for board in self._board if board is not own for word in board.tolist()):
                return
            time.sleep(_SLEEP_SECONDS)

    def until_own_kernel_waits(self) -> None:
        """Keep this rank's copy engine back until its kernel waits in vain, or has ended and is waited for no more."""
        while not self._joins and self._board[self._rank][_RANK] != self.state():
            time.sleep(_SLEEP_SECONDS)

    def is_still(self) -> bool:
        """Return whether nobody moves any more. A rank that watches the others has left."""
        return self._is_still(self.state())

    def state(self) -> int:
        """Return a number for the contents of all ranks' control areas; it is above 0."""
        state = 0
        for area in self._areas:
            state = zlib.crc32(area, state)
        return state + 1

    def _is_still(self, state: int) -> bool:
        every = [word for board in self._board for word in board.tolist()]
        # A copy engine may have raised its flag and gone since that state: then there is another one by now.
        return all(word in (state, _GONE) for word in every) and self.state() == state

    def _clock_of(self, waiter: int) -> Callable[[], float]:
        """A clock for a loop that reads it once between two polls of whatever control area."""

        def now() -> float:
            state = self.state()
            self._same[waiter] = self._same[waiter] + 1 if state == self._seen[waiter] else 0
            # A kernel looks at its clock after the poll that ends its wait, too. If it has looked twice since the state
            # was seen first, the poll between these looks was in vain.
            if self._same[waiter] > 1:
                self._board[self._rank][waiter] = state
                # The copy engine's thread names the peer that it waits for, before the kernel names the copy.
                if self._is_still(state) and (waiter == _COPIES or not self._num_fetches):
                    self._now += JUMP_SECONDS
                else:
                    time.sleep(_SLEEP_SECONDS)
            self._seen[waiter] = state
            return self._now

        return now

    def _start(self, start: Callable[..., None], arena: DeviceArena, fetches: Sequence[Any], *rest: Any) -> None:
        """A copy engine that has something to do is busy, until it waits as well."""
        with self._lock:
            self._num_fetches += 1
            self._board[self._rank][_COPIES] = _BUSY
        start(arena, fetches, *rest)
        started: Future[None] = arena.copies.started[-1]  # type: ignore[attr-defined]
        started.add_done_callback(self._end)

    def _join(self, join: Callable[[], None]) -> None:
        self._joins = True
        try:
            join()
        finally:
            self._joins = False

    def _end(self, _: Future[None]) -> None:
        with self._lock:
            self._num_fetches -= 1
            if not self._num_fetches:
                self._board[self._rank][_COPIES] = _GONE
