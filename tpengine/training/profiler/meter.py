"""What a rank's host sees of the recorded steps, beside the trace: what only the rank itself knows.

A trace says when an action began and ended. It does not say how much of the action was an exchange with other
tensor-parallel ranks, a reduction that did not run beside it, or an end of the model (ends.py); on a GPU, whose moments
are those of its stream, how long the host took to issue it; how long the rank waited for its text; and that a GPU's
allocator had to ask again. Nor does it say how long Linux let another thread run on this thread's core: then the rank
is not slow, its host is crowded. An action costs two more readings of the host's clock, and of that figure.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tpengine.observe.record_costs import metered_name
from tpengine.pipeline.executor import Clock, Handler
from tpengine.plan import Action, Kind
from tpengine.plan.actions import COMPUTE
from tpengine.training.profiler.ends import EndsMeter
from tpengine.training.train_step import TrainStep


class Meter:
    """Measures this rank while it runs recorded steps.

    Args:
        train_step: runs the steps.

    Attributes:
        train_step: as given.

    `begin` and `end` enclose a step.
    """

    def __init__(self, train_step: TrainStep) -> None:
        self.train_step, self._rank, self._buckets = train_step, train_step.state.rank, train_step.state.buckets
        self._handlers: Mapping[Kind, Handler] | None = None
        self._issue: defaultdict[str, list[float]] = defaultdict(list)
        self._exchange: defaultdict[str, list[float]] = defaultdict(list)
        self._reducing: defaultdict[str, list[float]] = defaultdict(list)
        self._starved: defaultdict[str, list[float]] = defaultdict(list)
        self._in_ends: defaultdict[str, list[float]] = defaultdict(list)
        # Of the current step: its device is not done.
        self._passed: list[tuple[str, list[tuple[Any, Any, int]]]] = []
        self._ends = EndsMeter(train_step.state.model, train_step.batch, self._waited_ns)
        self._core = _CoreQueue()
        self._read: list[float] = []
        self._reduced: list[float] = []
        self._retries, self._retries_at_begin, self._starting_at_begin = 0, 0, 0

    def begin(self, clock: Clock) -> None:
        """Measure what the executor computes, from now on.

        Args: clock: of the trace.
        """
        self._ends.begin(clock)
        if self._rank.device.type == "cpu":
            self._core.open()
        executor = self.train_step.executor
        self._handlers = executor.handlers
        executor.handlers = {
            kind: self._around(handler) if kind in COMPUTE else handler for kind, handler in executor.handlers.items()
        }
        self._retries_at_begin = _allocator_retries(self._rank.device)
        self._starting_at_begin = self._buckets.starting_ns

    def end(self) -> None:
        """Measure nothing any more, and note what belongs to the whole step."""
        assert self._handlers is not None, "a meter ends a step that it has begun"
        self.train_step.executor.handlers, self._handlers = self._handlers, None
        self._read.append(self.train_step.reader.seconds)
        self._reduced.append((self._buckets.starting_ns - self._starting_at_begin) * 1e-9)
        self._core.close()
        self._ends.end()
        for name, passed in self._passed:
            self._in_ends[name].append(self._ends.seconds_of(passed))
        self._passed.clear()
        self._retries += _allocator_retries(self._rank.device) - self._retries_at_begin

    def figures(self) -> dict[str, Any]:
        """Return what `record_costs.ranks_of` reads, of all steps so far."""
        return {
            "actions": {
                name: [
                    statistics.median(of[name])
                    for of in (self._issue, self._exchange, self._reducing, self._in_ends, self._starved)
                ]
                for name in self._issue
            },
            "reduced": statistics.median(self._reduced),
            "read": statistics.median(self._read),
            "retries": self._retries,
        }

    def _around(self, handler: Handler) -> Callable[[Action], None]:
        def handle(action: Action) -> None:
            waited, starting, queued = self._waited_ns(), self._buckets.starting_ns, self._core.waited_ns()
            begin = time.perf_counter()
            handler(action)
            name = metered_name(action.kind, action.piece[0])
            self._issue[name].append(time.perf_counter() - begin)
            self._exchange[name].append((self._waited_ns() - waited) * 1e-9)
            self._reducing[name].append((self._buckets.starting_ns - starting) * 1e-9)
            self._starved[name].append((self._core.waited_ns() - queued) * 1e-9)
            self._passed.append((name, self._ends.passed()))

        return handle

    def _waited_ns(self) -> int:
        arena = self._rank.comms.tp.arena
        return 0 if arena is None else arena.signals.waited_ns


class _CoreQueue:
    """How long this thread has stood in line for a core, by Linux; nothing where it does not say."""

    def __init__(self) -> None:
        self._file: int | None = None

    def open(self) -> None:
        """Begin to read; call it in the thread that computes."""
        with contextlib.suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def close(self) -> None:
        """Read no more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def waited_ns(self) -> int:
        """Return nanoseconds since the thread began; takes 2 us."""
        # Time on a core, time in line for one, number of turns.
        return 0 if self._file is None else int(os.pread(self._file, 128, 0).split()[1])


def _allocator_retries(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if device.type == "cuda" else 0
