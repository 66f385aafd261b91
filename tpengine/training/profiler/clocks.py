"""Clocks for a trace that need torch: a GPU's clock, and the offsets between the hosts' clocks.

On a GPU an action has run when its kernels have run, long after the host issued them. So a moment is a CUDA event on
the stream, and its time is read after the step. What only a GPU checks: all of `DeviceClock`.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from tpengine.distributed.process import hosts_of_ranks, link_device
from tpengine.observe.records import clock_offsets
from tpengine.pipeline.executor import Clock, HostClock

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
