"""Times of calls as a step makes them: all ranks at the same time, what was used long ago out of the caches.

A step passes hundreds of megabytes between two uses of the same tensor. So before each call that is timed a buffer
larger than the caches is read, and only then what the call before it would have written: a call that is repeated alone
attains a tenth to three times more than in a step.
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


def usual(seconds: Sequence[float]) -> float:
    """Return the mean without the slowest tenth, in which something else ran."""
    kept = sorted(seconds)[: max(1, len(seconds) - max(1, len(seconds) // 10))]
    return sum(kept) / len(kept)


class Clock:
    """Times calls.

    Args:
        device: where tensors live.
        seconds: how long one case is repeated, at least FEWEST_CALLS times.
        evicting_bytes: read before each call; more than the last cache, or 0 for what earlier calls have left there.
    """

    def __init__(self, device: torch.device, seconds: float, evicting_bytes: int) -> None:
        self.device, self.seconds = device, seconds
        self._evicting = torch.zeros(max(1, evicting_bytes // 4), device=device)

    def now(self) -> float:
        """Return the time, after everything that was started."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

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
        begin = self.now()
        call()
        return self.now() - begin

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
