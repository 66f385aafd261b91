"""Whether any rank still moves, once one has been asked to stop: a counter in the store where the ranks met. No torch.

A rank that waits cannot tell a peer that computes for long from one that is gone: both are silent. So all ranks add to
one counter, each only while it moves itself, and each sees in the sum that somebody does. That is one number whatever
the number of ranks, and one request a second. Before anybody has been asked to stop a thread asks every other second
for that alone.

The thread has a connection of its own, and the watch reads only a field: should the store hang with the rank that keeps
it, nothing else hangs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

_IDLE_SECONDS = 2.0
_BEAT_SECONDS = 1.0
_LAST_ANSWER_SECONDS = 2.0


class Store(Protocol):
    """What the ranks have in common."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which begins at 0; return the sum."""


class Pulse:
    """One rank's part; a context manager, in which its thread runs.

    Args:
        store: a connection that nobody else uses.
        asked: whether this rank has been asked to stop.
        moves: whether this rank has done something since it was last asked this.
        clock: seconds; only differences count.

    Attributes:
        moved_at: when this rank last learned that some rank moves; minus infinity before.
    """

    def __init__(
        self,
        store: Store,
        asked: Callable[[], bool],
        moves: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._asked, self._moves, self._clock = store, asked, moves, clock
        self.moved_at = float("-inf")
        self._has_told = self._anybody_asked = False
        self._sum: int | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tpengine-pulse", daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._closing.set()
        self._thread.join(_LAST_ANSWER_SECONDS)

    def beat(self) -> None:
        """Say whether this rank moves, and hear whether any does."""
        if not self._has_told and self._asked():
            self._has_told = True
            self._store.add("asked to stop", 1)
        if not self._anybody_asked:
            self._anybody_asked = self._store.add("asked to stop", 0) > 0
        if self._anybody_asked:
            total = self._store.add("moves", int(self._moves()))
            if total != self._sum:
                self._sum, self.moved_at = total, self._clock()

    def _run(self) -> None:
        while not self._closing.wait(_BEAT_SECONDS if self._anybody_asked else _IDLE_SECONDS):
            try:
                self.beat()
            except RuntimeError:
                return  # the store is gone with the process that kept it, and the watch goes on without
