"""Times of calls that all ranks make at the same time: one rank alone has the caches and the memory to itself.

A time is the lower quartile of the calls: other processes make calls slower, never faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# More than a core's share of the last cache: what is read in turns from so many bytes comes from memory.
COLD_BYTES = 48 << 20


def usual(seconds: Sequence[float]) -> float:
    """Return the lower quartile."""
    return sorted(seconds)[len(seconds) // 4]


class Clock:
    """Times calls.

    Args:
        device: where tensors live.
        seconds: how long one case is repeated, at least five times.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.seconds = device, seconds

    def now(self) -> float:
        """Return the time, after everything that was started."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def together(self) -> None:
        """Wait for all ranks."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()

    def of_call(self, calls: Sequence[Callable[[], object]]) -> float:
        """Return the time of calls that take turns, each with operands of its own."""
        calls[0]()
        self.together()
        taken: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(taken) < 5 or time.perf_counter() < end:
            call = calls[len(taken) % len(calls)]
            begin = self.now()
            call()
            taken.append(self.now() - begin)
        return usual(taken)

    def of_graph(self, make: Callable[[], Tensor], run: Callable[[Tensor], Tensor], number: int) -> tuple[float, float]:
        """Return the times of forward and backward of an operator.

        As in training an input has just been written, an output is memory that was not used lately, and backward reads
        what forward has kept a while ago: `number` graphs are made, then differentiated, the last first.
        """
        forward: list[float] = []
        backward: list[float] = []
        self.together()
        end = time.perf_counter() + self.seconds
        while len(forward) < number + 5 or time.perf_counter() < end:
            graphs = []
            for _ in range(number):
                x = make()
                begin = self.now()
                y = run(x)
                forward.append(self.now() - begin)
                graphs.append(y)
            while graphs:
                y = graphs.pop()
                dy = torch.ones_like(y)
                begin = self.now()
                torch.autograd.backward(y, dy)
                backward.append(self.now() - begin)
        return usual(forward[1:]), usual(backward[1:])
