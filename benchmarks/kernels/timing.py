"""Time and memory of one call of an operator, on a GPU by its own clock; the ceilings to hold it against.

Interleaving, rotation and pairing, and their traps, are in harness/timing.py. On a GPU these also give wrong numbers:

1.  Launches do not wait. Events in the stream measure the time, before and after the call; a sample ends with a wait
    for the second event.
2.  A GPU that waits for Python. If the stream is idle when the first event is recorded, the host's time until the first
    launch is counted. So buffers are zeroed first, as often as the call's host time needs, and everything is queued
    when the first event comes.
3.  Operands left in the cache by the call before: a 50 MB L2 makes a small copy twice as fast as memory. The zeroed
    buffers are 256 MiB, and evict what was there. On a CPU nothing is flushed: small operands stay in its caches, and
    a share of the copy's speed may be above 100 %.
4.  An event's clock ticks about every half microsecond. A call below 20 us is called several times per sample, each
    with its own events, flush and wait.
5.  The first calls compile, allocate and build tables. They are made before, and do not count.
6.  torch.compile's cache is by source line: after eight shapes it runs eagerly, and only logs it. It is emptied before
    each case.
7.  A backward pass repeated on one graph. Compiled graphs give their saved tensors away, and an operator may write its
    gradient over what it saved, so a second pass would compute from garbage. A graph is built before each backward,
    outside the measured time, and inputs that any contestant overwrites are restored.
8.  Deterministic mode also fills every new tensor with NaN. That is switched off where determinism is timed.
9.  A ceiling from a data sheet is never reached. The ceiling is a copy's or a matmul's speed, measured in the same run.
10. A small gradient beside a large one: each contestant computes all of them, and forward is timed as training calls
    it, keeping what backward needs.
11. Peak memory with leftovers of other contestants. It is counted from what is allocated before the call, including
    results, and nothing of another contestant is alive then.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.harness.timing import Spread
from benchmarks.kernels.cases.cases import Ceiling, Contestant, Direction
from benchmarks.kernels.check import as_list

_FLUSH_BYTES = 256 << 20
_MOST_FLUSHES = 50
_SHORT_SECONDS, _SHORT_CALLS = 20e-6, 10
_WARM_CALLS = 3

Call = Callable[[], object]


class Clock(Protocol):
    """Times one call; what the call returns lives until the time is taken."""

    def seconds(self, call: Call) -> float: ...

    def learn(self, call: Call) -> None:
        """Measure what the clock needs to know about a call before it is timed."""


class HostClock:
    """The host's clock, around a call that itself waits for its work."""

    def seconds(self, call: Call) -> float:
        begin = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - begin
        del result
        return seconds

    def learn(self, call: Call) -> None:
        call()


class CudaClock:
    """Events around a call, after flushes of the cache that last at least as long as the host needs to launch it."""

    def __init__(self) -> None:
        self._buffer = flush_buffer()
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._num_flushes = 1
        self._buffer.zero_()
        self._flush_seconds = self.seconds(self._buffer.zero_)

    def learn(self, call: Call) -> None:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        result = call()
        host_seconds = time.perf_counter() - begin
        torch.cuda.synchronize()
        del result
        self._num_flushes = min(_MOST_FLUSHES, 1 + math.ceil(1.5 * host_seconds / self._flush_seconds))

    def seconds(self, call: Call) -> float:
        for _ in range(self._num_flushes):
            self._buffer.zero_()
        self._start.record()
        result = call()
        self._end.record()
        self._end.synchronize()
        del result
        return self._start.elapsed_time(self._end) / 1e3


@functools.cache
def flush_buffer() -> Tensor:
    """Return the GPU memory that is written between samples to empty the cache."""
    return torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")


def make_clock(device: str) -> Clock:
    """Return the clock for a device."""
    return CudaClock() if device == "cuda" else HostClock()


class Operands:
    """What a case's contestants share: leaves, gradients of outputs, and the original values of what any overwrites."""

    def __init__(
        self, inputs: Mapping[str, Tensor], slopes: Sequence[Tensor], contestants: Iterable[Contestant]
    ) -> None:
        self.inputs, self.slopes = inputs, slopes
        self.leaves = [tensor for tensor in inputs.values() if tensor.requires_grad]
        every = list(contestants)
        overwritten = [inputs[name] for name in inputs if any(name in one.overwrites for one in every)]
        if any(one.overwrites_slopes for one in every):
            overwritten += slopes
        self._originals = [(tensor, tensor.detach().clone()) for tensor in overwritten]

    def restore(self) -> None:
        """Restore the values that a call has overwritten."""
        with torch.no_grad():
            for tensor, original in self._originals:
                tensor.copy_(original)


class Timed:
    """A contestant in one direction: times calls, with what a call needs prepared before it.

    Args:
        contestant: what is called.
        operands: its arguments.
        direction: what is timed; before backward, forward runs untimed.
        device: of the operands.
    """

    def __init__(self, contestant: Contestant, operands: Operands, direction: Direction, device: str) -> None:
        self._contestant, self._operands, self._direction = contestant, operands, direction
        self._device, self._clock, self._num_calls = device, make_clock(device), 1
        self._outputs: list[Tensor] = []

    def warm_up(self) -> None:
        """Call a few times, and determine how many calls make a sample."""
        seconds = []
        for _ in range(_WARM_CALLS):
            with self._prepared() as call:
                self._clock.learn(call)
            seconds.append(self.seconds())
        self._num_calls = _SHORT_CALLS if Spread.of(seconds).median < _SHORT_SECONDS else 1

    def seconds(self) -> float:
        """Return one sample: a call's time, or the mean of several if calls are short."""
        total = 0.0
        for _ in range(self._num_calls):
            with self._prepared() as call:
                total += self._clock.seconds(call)
        return total / self._num_calls

    def peak_bytes(self) -> int | None:
        """Return the peak memory of a call besides inputs and slopes, backward's with its forward; None on a CPU."""
        if self._device == "cpu":
            return None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with self._prepared() as call:
            result = call()
            torch.cuda.synchronize()
            del result
        return torch.cuda.max_memory_allocated() - before

    @contextlib.contextmanager
    def _prepared(self) -> Iterator[Call]:
        self._operands.restore()
        with self._contestant.context():
            try:
                if self._direction == "backward":
                    self._outputs = self._forward()
                yield {"forward": self._forward, "backward": self._backward, "both": self._both}[self._direction]
            finally:
                self._outputs = []

    def _forward(self) -> list[Tensor]:
        return as_list(self._contestant.function(**self._operands.inputs))

    def _backward(self) -> Sequence[Tensor]:
        return torch.autograd.grad(self._outputs, self._operands.leaves, self._operands.slopes)

    def _both(self) -> Any:
        outputs = self._forward()
        return outputs, torch.autograd.grad(outputs, self._operands.leaves, self._operands.slopes)


def measure_ceilings(device: str, dtype: torch.dtype, *, samples: int = 10) -> dict[Ceiling, float]:
    """Return the speed of a large copy, in bytes read and written per second, and of a large matmul, in flops/s.

    The fastest sample counts: other work on the machine must not lower a ceiling.
    """
    copy_bytes, size = (1 << 30, 8192) if device == "cuda" else (64 << 20, 1536)
    source, target = (torch.zeros(copy_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    copy = _fastest_seconds(device, lambda: target.copy_(source), samples)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    matmul = _fastest_seconds(device, lambda: torch.mm(a, b, out=product), samples)
    return {"copy": 2 * copy_bytes / copy, "matmul": 2 * size**3 / matmul}


def _fastest_seconds(device: str, call: Call, samples: int) -> float:
    clock = make_clock(device)
    for _ in range(_WARM_CALLS):
        clock.learn(call)
    return min(clock.seconds(call) for _ in range(samples))
