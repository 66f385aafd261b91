"""Collectives under way: what a caller holds between starting one and waiting for it."""

from __future__ import annotations

import concurrent.futures
from concurrent.futures import Future
from typing import Any, Protocol

from torch import Tensor


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Block until the result is there (on CUDA: until the current stream will see it)."""

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""


class Done:
    """A collective that has ended, or one of a single rank."""

    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True


class Staged:
    """A collective on a host copy of a CUDA tensor: waiting copies the result back."""

    def __init__(self, pending: Pending, host: Tensor, target: Tensor) -> None:
        self.pending, self.host, self.target = pending, host, target

    def wait(self) -> None:
        self.pending.wait()
        self.target.copy_(self.host)

    def is_completed(self) -> bool:
        return self.pending.is_completed()


class Submitted:
    """An exchange that the communicator's thread does; the future says when it has ended, as perf_counter_ns."""

    def __init__(self, future: Future[int]) -> None:
        self._future = future

    def is_completed(self) -> bool:
        return self._future.done()

    def ended_ns(self) -> int:
        """When it ended, by time.perf_counter_ns, for a trace; waits until then."""
        return self._future.result()

    def settle(self) -> None:
        """Wait until it has ended, whatever came of it."""
        concurrent.futures.wait([self._future])

    def wait(self) -> None:
        self._future.result()
