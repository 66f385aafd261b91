"""Pending collectives: the object that a caller holds between starting a collective and waiting for it.

Each is a `Work`, whether a process group runs it, a communicator's thread runs it, or it has already ended.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from torch import Tensor

from tpkernels.exchange.tree import tree_sum


class Work(Protocol):
    """A collective that has been started."""

    def wait(self) -> None:
        """Block until the result is there (on CUDA: make the current stream wait for it)."""

    def is_complete(self) -> bool:
        """Return whether `wait` would return at once."""

    def ended_ns(self) -> int | None:
        """Return when it ended, as time.perf_counter_ns, or None if that is not known; call it after `wait`."""


class Done:
    """A collective that ended before this was made, or one of a single rank."""

    def __init__(self) -> None:
        self._ended_ns = time.perf_counter_ns()

    def wait(self) -> None:
        """See Work."""

    def is_complete(self) -> bool:
        """See Work."""
        return True

    def ended_ns(self) -> int:
        """See Work."""
        return self._ended_ns


class Collective:
    """A collective of a process group.

    Args:
        work: torch's work object.
        staged: (copy that the group works on, tensor to which `wait` copies it); None if the group works in place.
    """

    def __init__(self, work: Any, staged: tuple[Tensor, Tensor] | None = None) -> None:
        self._work, self._staged = work, staged

    def wait(self) -> None:
        """See Work."""
        self._work.wait()
        if self._staged is not None:
            copy, target = self._staged
            target.copy_(copy)

    def is_complete(self) -> bool:
        """See Work."""
        return bool(self._work.is_completed())

    def ended_ns(self) -> None:
        """See Work."""
        return None


class Parts:
    """An exchange that gives this rank one part of every rank; waiting adds them in a balanced tree of ranks.

    Args:
        work: torch's.
        parts: by rank, there when the work has ended.
        out: where their sum goes.
    """

    def __init__(self, work: Any, parts: Sequence[Tensor], out: Tensor) -> None:
        self._work, self._parts, self._out = work, parts, out

    def wait(self) -> None:
        """See Work."""
        self._work.wait()
        if self._parts[0].device == self._out.device:
            tree_sum(self._parts, self._out)
        else:
            self._out.copy_(tree_sum(self._parts))
        self._parts = ()

    def is_complete(self) -> bool:
        """See Work."""
        return bool(self._work.is_completed())

    def ended_ns(self) -> None:
        """See Work."""
        return None


class Messages:
    """Messages to and from other ranks over gloo.

    Args:
        works: torch's.
        sent: what is read until they have gone.
    """

    def __init__(self, works: Sequence[Any], sent: Tensor) -> None:
        self._works, self._sent = works, sent

    def wait(self) -> None:
        """See Work."""
        for work in self._works:
            work.wait()

    def is_complete(self) -> bool:
        """See Work; gloo does not tell before `wait`."""
        return all(work.is_completed() for work in self._works)

    def ended_ns(self) -> None:
        """See Work."""
        return None


class Submitted:
    """An exchange that a communicator's thread makes; the future's result is the time it ended, as perf_counter_ns."""

    def __init__(self, future: Future[int]) -> None:
        self._future = future

    def wait(self) -> None:
        """See Work."""
        self._future.result()

    def is_complete(self) -> bool:
        """See Work."""
        return self._future.done()

    def ended_ns(self) -> int:
        """See Work."""
        return self._future.result()

    def settle(self) -> None:
        """Wait until it has ended, also if it failed; raise nothing."""
        concurrent.futures.wait([self._future])
