"""Times of calls as a step makes them: all ranks at the same time, what was used long ago out of the caches.

A step passes hundreds of megabytes between two uses of the same tensor. So before each call that is timed a buffer
larger than the caches is read, and only then what the call before it would have written: a call that is repeated alone
attains a tenth to three times more than in a step.

On a GPU what runs and what the host takes to start it are two things, of which the planner counts the longer: a clock
for each.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Calls that are timed of each case, at least.
FEWEST_CALLS = 3
# How long a GPU is kept busy while the host starts a call: half as long again as the last one took, within these.
_COVER_SECONDS = (2e-4, 5e-3)
# Above any GPU's clock, by which its waiting is counted.
_CYCLES_PER_SECOND = 2.5e9


def usual(seconds: Sequence[float]) -> float:
    """Return the mean without the slowest tenth, in which something else ran."""
    kept = sorted(seconds)[: max(1, len(seconds) - max(1, len(seconds) // 10))]
    return sum(kept) / len(kept)


class CallClock:
    """Times calls on the host; on a GPU see `DeviceCallClock` and `LaunchClock`.

    Args:
        device: where tensors live.
        seconds: how long one case is repeated, at least FEWEST_CALLS times.
        evicting_bytes: read before each call; more than the last cache, or 0 for what earlier calls have left there.
    """

    def __init__(self, device: torch.device, seconds: float, evicting_bytes: int) -> None:
        self.device, self.seconds = device, seconds
        self._evicting = torch.zeros(max(1, evicting_bytes // 4), device=device)

    def together(self) -> None:
        """Wait for all ranks."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()

    def evict(self) -> None:
        """Read what pushes all else out of the caches."""
        self._evicting.sum()

    def of_call(
        self, calls: Sequence[Callable[[], object]], *, hot: Sequence[Tensor] = (), is_cold: bool = True
    ) -> float:
        """Return the time of calls that take turns, each with operands of its own.

        Args:
            calls: all ranks make the same.
            hot: what the call before has just written.
            is_cold: everything else comes from memory; else what earlier calls have left in the caches is there.
        """
        taken: list[float] = []
        end = self._end()
        while self._goes_on(taken, FEWEST_CALLS, end):
            call = calls[len(taken) % len(calls)]
            taken.append(self._timed(call, hot, is_cold=is_cold))
        return usual(taken[1:])

    def of_graph(
        self, make: Callable[[], Tensor], run: Callable[[Tensor], Tensor], number: int, *, is_cold: bool = True
    ) -> tuple[float, float]:
        """Return the times of forward and backward of an operator.

        As in training an input has just been written, an output is memory that was not used lately, and backward reads
        what forward has kept a while ago: `number` graphs are made, then differentiated, the last first.
        """
        forward: list[float] = []
        backward: list[float] = []
        end = self._end()
        while self._goes_on(forward, FEWEST_CALLS, end):
            graphs = [self._made(make, run, forward, is_cold=is_cold) for _ in range(number)]
            while graphs:
                y = graphs.pop()
                dy = torch.ones_like(y)
                call = functools.partial(torch.autograd.backward, y, dy)
                backward.append(self._timed(call, [dy], is_cold=is_cold))
        return usual(forward[1:]), usual(backward[1:])

    def _made(
        self, make: Callable[[], Tensor], run: Callable[[Tensor], Tensor], taken: list[float], *, is_cold: bool
    ) -> Tensor:
        """Return a graph, and append what its forward took."""
        x = make()
        made: list[Tensor] = []
        taken.append(self._timed(lambda: made.append(run(x)), [x], is_cold=is_cold))
        return made[0]

    def _timed(self, call: Callable[[], object], hot: Sequence[Tensor], *, is_cold: bool) -> float:
        if is_cold:
            self.evict()
            self.together()
        for x in hot:
            x.detach().sum()
        return self._seconds(call)

    def _seconds(self, call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def _end(self) -> float:
        self.together()
        return time.perf_counter() + self.seconds

    def _goes_on(self, taken: Sequence[float], least: int, end: float) -> bool:
        """Return whether ranks time another call: all the same, since they wait for each other."""
        if len(taken) <= least:
            return True
        goes_on = torch.tensor([time.perf_counter() < end])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(goes_on, 0)
        return bool(goes_on)


class DeviceCallClock(CallClock):
    """The GPU's time of calls, by events; a GPU that waited for the host would count the host's time.

    So it is kept busy until the host has started the call. The first call of each case, which compiles, does not count.
    """

    def __init__(self, device: torch.device, seconds: float, evicting_bytes: int) -> None:
        super().__init__(device, seconds, evicting_bytes)
        self._cover_s = _COVER_SECONDS[0]

    def _seconds(self, call: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(self._cover_s * _CYCLES_PER_SECOND))
        begin.record()
        host_s = super()._seconds(call)
        end.record()
        end.synchronize()
        least, most = _COVER_SECONDS
        self._cover_s = min(most, max(least, 1.5 * host_s))
        return begin.elapsed_time(end) / 1e3


class LaunchClock(CallClock):
    """The host's time to start calls on a GPU, which does not wait for them."""

    def _seconds(self, call: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        seconds = super()._seconds(call)
        torch.cuda.synchronize()
        return seconds


def clock_of(device: torch.device, seconds: float, evicting_bytes: int) -> CallClock:
    """Return the clock for what runs on a device; arguments as of `CallClock`."""
    return (DeviceCallClock if device.type == "cuda" else CallClock)(device, seconds, evicting_bytes)


def host_clock_of(device: torch.device, seconds: float) -> CallClock:
    """Return the clock for the host's part of calls."""
    return (LaunchClock if device.type == "cuda" else CallClock)(device, seconds, 0)
