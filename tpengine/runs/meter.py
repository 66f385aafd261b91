"""What a rank measures of recorded steps beside the trace: by its host, in the model's ends, by a GPU's clock.

A trace says when an action began and ended. It does not say how much of the action was an exchange with other
tensor-parallel ranks, a reduction that did not run beside it, or an end of the model; on a GPU, whose moments
are those of its stream, how long the host took to issue it; how long the rank waited for its text; and that a GPU's
allocator had to ask again. Nor does it say how long Linux let another thread run on this thread's core: then the rank
is not slow, its host is crowded. An action costs two more readings of the host's clock, and of that figure.

Ends are the embedding, and norm, head and loss behind the last block. Stages have equal layers, but only two have an
end. What a stage takes without its end can be compared with the others; flops alone do not say what an end takes, above
all on a CPU. Begin and end are moments of the trace's clock, taken where tensors enter and leave the modules, forward
and back. Of backward's second half (W) nothing is known: there the end's modules do not come up.

On a GPU an action has run when its kernels have run, long after the host issued them. So a moment is a CUDA event on
the stream, and its time is read after the step. What only a GPU checks: all of `DeviceClock`.
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
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from tpengine.distributed.process import hosts_of_ranks, link_device
from tpengine.model.transformer import Transformer
from tpengine.observe.records import clock_offsets, metered_name
from tpengine.pipeline.executor import Clock, Handler, HostClock
from tpengine.plan import Action, Kind
from tpengine.plan.actions import COMPUTE
from tpengine.training.step_loss import TrainingBatch
from tpengine.training.train_step import TrainStep

# How often the ranks meet to compare clocks. The median is used, so that a delay by an interrupt does not count.
_NUM_MEETINGS = 9


class DeviceClock:
    """A GPU's stream as a clock: moments are events in the order of its kernels.

    Args:
        device: the GPU whose current stream is followed. The constructor waits for it.

    Numerics: events are accurate to about 1 us. They are aligned with the host's clock once, in the constructor; over
        the length of a step both clocks run at the same speed.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self._begin = torch.cuda.Event(enable_timing=True)
        self._begin.record()
        self._begin.synchronize()
        self._begin_ns = time.perf_counter_ns()

    def now(self) -> torch.cuda.Event:
        """Record an event; this takes 1 or 2 us of the host's time."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ns(self, moment: torch.cuda.Event) -> int:
        """Return when the stream came to an event; waits until it has."""
        moment.synchronize()
        return self._begin_ns + round(self._begin.elapsed_time(moment) * 1e6)


def clock_of(device: torch.device) -> Clock:
    """Return a clock for actions that compute on `device`, aligned with the host's clock now."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


def offsets_of_ranks(device: torch.device) -> list[int]:
    """Return by how many nanoseconds each rank's clock is ahead of rank 0's; collective.

    Ranks of one host read the same clock (CLOCK_MONOTONIC on Linux), and have the same offset. With several hosts, all
    ranks meet some times in an all-reduce and read their clocks as they leave it: see `clock_offsets`.

    Numerics: the error is how much later one host leaves a meeting than another, typically some 10 us.
    """
    hosts = hosts_of_ranks(device)
    if len(set(hosts)) == 1:
        return [0] * len(hosts)
    link = link_device(device)
    readings = []
    for _ in range(_NUM_MEETINGS):
        number = torch.zeros(1, device=link)
        dist.all_reduce(number)
        # The sum can be read only when every rank has come.
        number.item()
        readings.append(time.perf_counter_ns())
    mine = torch.tensor(readings, dtype=torch.int64, device=link)
    everyone = [torch.empty_like(mine) for _ in hosts]
    dist.all_gather(everyone, mine)
    return clock_offsets(hosts, [[int(reading) for reading in of_rank] for of_rank in everyone])


class EndsMeter:
    """Takes the moments of a rank's ends while it runs a recorded step.

    Args:
        model: whose ends they are.
        batch: computes the losses.
        waited_ns: how long this rank has waited for tensor-parallel ranks so far: that is not counted.

    `begin` and `end` enclose a step.
    """

    def __init__(self, model: Transformer, batch: TrainingBatch, waited_ns: Callable[[], int]) -> None:
        self._model, self._batch, self._waited_ns = model, batch, waited_ns
        self._clock: Clock | None = None
        self._handles: list[RemovableHandle] = []
        # Of the batch, as it was: somebody else may have put another in place of its own.
        self._unwatched: dict[str, Any] = {}
        # Begin, end and the wait in between, of what the current action has passed.
        self._passed: list[tuple[Any, Any, int]] = []
        self._open: dict[str, tuple[Any, int]] = {}

    def begin(self, clock: Clock) -> None:
        """Take moments of this clock, from now on."""
        self._clock = clock
        model, batch = self._model, self._batch
        if model.is_first:
            self._around("embedding", model.embed_tokens, model.embed_tokens)
        if model.is_last:
            self._around("head", model.norm, model.lm_head)
            # The loss is no module. Its backward begins the head's.
            self._unwatched = {name: value for name, value in vars(batch).items() if name == "loss"}
            batch.loss = self._loss(batch.loss)  # type: ignore[method-assign, assignment]

    def end(self) -> None:
        """Take no moments any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open.clear()
        vars(self._batch).pop("loss", None)
        vars(self._batch).update(self._unwatched)
        self._unwatched = {}

    def passed(self) -> list[tuple[Any, Any, int]]:
        """Return begin, end and nanoseconds of waiting of each pass through an end since the last call."""
        found, self._passed = self._passed, []
        return found

    def seconds_of(self, passed: list[tuple[Any, Any, int]]) -> float:
        """Return how long passes took; waits for the device."""
        assert self._clock is not None, "passes were taken by a clock"
        ns = self._clock.ns
        return sum(max(0, ns(end) - ns(begin) - waited) for begin, end, waited in passed) * 1e-9

    def _around(self, name: str, first: Module, last: Module) -> None:
        """Watch an end: from the input of its first module to the output of its last, and back."""

        def enter(_: Module, inputs: tuple[Any, ...]) -> None:
            x = inputs[0]
            if x.requires_grad:
                x.register_hook(lambda _: self._close(f"{name} backward"))
            self._begin(name)

        def leave(_: Module, __: Any, y: Tensor) -> None:
            self._close(name)
            # A lookup has no input's gradient: what ends it is its node. The head's begins with the loss's.
            if name == "embedding" and y.grad_fn is not None:
                y.grad_fn.register_prehook(lambda _: self._begin(f"{name} backward"))
                y.grad_fn.register_hook(lambda *_: self._close(f"{name} backward"))

        self._handles += [first.register_forward_pre_hook(enter), last.register_forward_hook(leave)]

    def _loss(self, compute: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
        def loss(y: Tensor, microbatch: int) -> Tensor:
            self._begin("loss")
            value = compute(y, microbatch)
            self._close("loss")
            if value.requires_grad:
                value.register_hook(lambda _: self._begin("head backward"))
            return value

        return loss

    def _begin(self, name: str) -> None:
        if self._clock is not None:
            self._open[name] = self._clock.now(), self._waited_ns()

    def _close(self, name: str) -> None:
        if self._clock is not None and name in self._open:
            begin, waited = self._open.pop(name)
            self._passed.append((begin, self._clock.now(), self._waited_ns() - waited))


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
