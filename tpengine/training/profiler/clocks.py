"""The clocks of a trace that need torch: a GPU's, and how far the hosts' clocks are apart.

On a GPU an action has run when its kernels have, long after the host issued them: a moment is a CUDA event on the
stream, and its time is read after the step. What only a GPU checks: all of `DeviceClock`.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from tpengine.distributed.process import hosts_of_ranks, link_device
from tpengine.observe.records import clock_offsets
from tpengine.pipeline.executor import Clock, HostClock

# The middle of so many meetings: one that an interrupt delays does not count.
_NUM_MEETINGS = 9


class DeviceClock:
    """A GPU's stream as a clock: moments are events in the order of its kernels.

    Args:
        device: whose current stream is followed. It is waited for once, here.

    Numerics: events are good to about 1 us; they are set on the host's clock once, here, and both run at one speed for
        the length of a step.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        self._begin = torch.cuda.Event(enable_timing=True)
        self._begin.record()
        self._begin.synchronize()
        self._begin_ns = time.perf_counter_ns()

    def now(self) -> torch.cuda.Event:
        """Record an event; a microsecond or two of the host's time."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ns(self, moment: torch.cuda.Event) -> int:
        """Return when the stream came to an event; waits until it has."""
        moment.synchronize()
        return self._begin_ns + round(self._begin.elapsed_time(moment) * 1e6)


def clock_of(device: torch.device) -> Clock:
    """Return the clock for actions that compute on `device`, set now."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


def offsets_of_ranks(device: torch.device) -> list[int]:
    """Return by how many nanoseconds each rank's clock is ahead of rank 0's; collective.

    Ranks of one host read one clock, which is CLOCK_MONOTONIC on Linux, and are ahead by the same. Between hosts all
    ranks meet some times, and read their clocks as they leave: `clock_offsets`.

    Numerics: wrong by how much later one host leaves a meeting than another, typically some 10 us.
    """
    hosts = hosts_of_ranks(device)
    if len(set(hosts)) == 1:
        return [0] * len(hosts)
    link = link_device(device)
    readings = []
    for _ in range(_NUM_MEETINGS):
        number = torch.zeros(1, device=link)
        dist.all_reduce(number)
        # The sum can be read when every rank has come.
        number.item()
        readings.append(time.perf_counter_ns())
    mine = torch.tensor(readings, dtype=torch.int64, device=link)
    everyone = [torch.empty_like(mine) for _ in hosts]
    dist.all_gather(everyone, mine)
    return clock_offsets(hosts, [[int(reading) for reading in of_rank] for of_rank in everyone])
