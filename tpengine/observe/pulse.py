"""The pulse: whether any rank still makes progress after a request to stop. No torch.

A waiting rank cannot distinguish a peer that computes for a long time from one that is gone: both are silent. So all
ranks add to one counter in the store where they met, each only while it makes progress itself. If the sum grows, some
rank makes progress. That is one number for any number of ranks, and one request per second. Before a request to stop,
the thread only asks, every two seconds, whether any rank has been asked.

The thread has its own connection, and the watch only reads a field. So if the store hangs with the rank that keeps it,
nothing else does.
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
    """The store that all ranks share."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0; return the sum."""


class Pulse:
    """One rank's part; a context manager that runs the thread.

    Args:
        store: a connection that nothing else uses.
        asked: returns whether this rank has been asked to stop.
        moves: returns whether this rank has made progress since the last call.
        clock: seconds; only differences matter.

    Attributes:
        moved_at: when this rank last learned that some rank makes progress; minus infinity before that.
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
        self._thread = threading.Thread(target=self.run, name="tpengine-pulse", daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._closing.set()
        self._thread.join(_LAST_ANSWER_SECONDS)

    def beat(self) -> None:
        """Report whether this rank makes progress, and read whether any does."""
        if not self._has_told and self._asked():
            self._has_told = True
            self._store.add("asked to stop", 1)
        if not self._anybody_asked:
            self._anybody_asked = self._store.add("asked to stop", 0) > 0
        if self._anybody_asked:
            total = self._store.add("moves", int(self._moves()))
            if total != self._sum:
                self._sum, self.moved_at = total, self._clock()

    def run(self) -> None:
        """Beat until the pulse is closed or the store is gone; the thread's work."""
        while not self._closing.wait(_BEAT_SECONDS if self._anybody_asked else _IDLE_SECONDS):
            try:
                self.beat()
            except RuntimeError:
                return  # the store is gone with the process that kept it; the watch continues without the pulse
