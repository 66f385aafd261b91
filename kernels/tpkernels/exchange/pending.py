"""Collectives under way: what a caller holds between starting one and waiting for it.

All are a `Work`, whoever carries them: a process group, a communicator's thread, or nobody, as they have ended.
"""

from __future__ import annotations

import concurrent.futures
from concurrent.futures import Future
from typing import Any, Protocol

from torch import Tensor


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until the result is there (on CUDA: until the current stream will see it)."""

    def is_complete(self) -> bool:
        """Whether `wait` would return at once."""

    def ended_ns(self) -> int | None:
        """When it ended, by time.perf_counter_ns, for a trace; None if what carried it does not know. After `wait`."""


class Done:
    """A collective that has ended, or one of a single rank."""

    def wait(self) -> None:
        """As Work."""

    def is_complete(self) -> bool:
        """As Work."""
        return True

    def ended_ns(self) -> None:
        """As Work."""
        return None


class Collective:
    """A collective of a process group.

    Args:
        work: torch's.
        staged: (copy that the group works on, tensor that waiting copies it to); None if it works in place.
    """

    def __init__(self, work: Any, staged: tuple[Tensor, Tensor] | None = None) -> None:
        self._work, self._staged = work, staged

    def wait(self) -> None:
        """As Work."""
        self._work.wait()
        if self._staged is not None:
            copy, target = self._staged
            target.copy_(copy)

    def is_complete(self) -> bool:
        """As Work."""
        return bool(self._work.is_completed())

    def ended_ns(self) -> None:
        """As Work."""
        return None


class Submitted:
    """An exchange that a communicator's thread does; the future says when it has ended, as perf_counter_ns."""

    def __init__(self, future: Future[int]) -> None:
        self._future = future

    def wait(self) -> None:
        """As Work."""
        self._future.result()

    def is_complete(self) -> bool:
        """As Work."""
        return self._future.done()

    def ended_ns(self) -> int:
        """As Work."""
        return self._future.result()

    def settle(self) -> None:
        """Wait until it has ended, whatever came of it."""
        concurrent.futures.wait([self._future])
