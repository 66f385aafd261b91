"""Co-located ranks in one process on one GPU, each with its own streams and memory; and the clock of their calls.

Processes on one GPU run in turns (time slices), so they show no overlap. The ranks here are resident together: each
persistent kernel has as many programs as its rank's part of the processors can hold. What gives wrong numbers, or none:

1.  A rank waits for another rank whose kernels are not launched yet, and its programs occupy what those need. So all
    launches of a call are queued behind flushes of the cache, and begin together when the flushes have ended.
    `RanksClock` makes the flushes longer until they last as long as the host needs to launch.
2.  A kernel's code is loaded at its first launch, for which CUDA may wait until the GPU is idle, while a program waits
    for that very kernel. `load` compiles and loads what a call launches before anything is launched.
3.  Streams share hardware queues, 8 by default, and what waits in a queue blocks what another stream has put behind it.
    `prepare_environment` asks for 32; each rank has two streams.
4.  Memory that is allocated while programs wait. `load` makes the same allocations on the same streams before.
5.  Copies within a GPU run at its memory's speed, not at a link's, and on its processors instead of a copy engine. So
    no time of theirs says what a link hides: calls of co-located ranks are checked, and only their parts are timed.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from tpkernels.exchange.copies import Copies, StreamCopies
from tpkernels.exchange.device_arena import CONTROL_BYTES, NUM_GENERATIONS, DeviceArena
from tpkernels.launch import num_processors, observed, target_of
from tpkernels.ops.matmul.configs import config_of
from tpkernels.ops.matmul.kernel import launch_matmul
from tpkernels.symmetric.cuda_memory import VirtualMemory, host_record

_FLUSH_BYTES = 256 << 20
# 60 ms on an H200.
MOST_FLUSHES = 1000
_MOST_TRIES = 4
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_PAGE_BYTES = 4096
# Limit for a deadlock, which then is a red check.
TIMEOUT_SECONDS = 10.0

T = TypeVar("T")


def prepare_environment() -> None:
    """Ask for enough hardware queues, unless the user has set their number; call it before CUDA starts."""
    os.environ.setdefault(_CONNECTIONS, "32")


class VirtualRanks:
    """Co-located ranks: ranks that share a device.

    Args:
        world: number of ranks.
        device: a GPU; another device if launches are only observed, or interpreted.
        copies: each rank's copy engine; by default a stream's.

    Attributes:
        world, device: as given.
        processors: number of processors per rank.
        streams: one per rank; none if the device is not a GPU.
    """

    def __init__(self, world: int, device: torch.device, copies: Sequence[Copies] | None = None) -> None:
        self.world, self.device = world, device
        self.processors = max(num_processors(torch.empty(0, device=device)) // world, 1)
        on_gpu = device.type == "cuda"
        self.streams = [torch.cuda.Stream(device) for _ in range(world)] if on_gpu else []
        self._copies = [StreamCopies(device) for _ in range(world)] if copies is None else copies

    def arenas(self, generation_bytes: int, timeout_seconds: float = TIMEOUT_SECONDS) -> list[DeviceArena]:
        """Return new arenas, one per rank, with generations of this many bytes, in memory that all of them address."""
        whole = -(-generation_bytes // _PAGE_BYTES) * _PAGE_BYTES
        num_bytes = -(-CONTROL_BYTES // _PAGE_BYTES) * _PAGE_BYTES + NUM_GENERATIONS * whole
        arenas = []
        for memory, copies in zip(
            VirtualMemory.allocate(self.world, num_bytes, self.device), self._copies, strict=True
        ):
            arena = DeviceArena(
                memory, host_record(), copies, whole, "of co-located ranks", range(self.world), timeout_seconds
            )
            arena.processors = self.processors
            arenas.append(arena)
        self.settle()
        return arenas

    def each(self, call: Callable[[int], T]) -> list[T]:
        """Call for every rank, on its stream; return the results by rank."""
        results = []
        for rank in range(self.world):
            with torch.cuda.stream(self.streams[rank]) if self.streams else contextlib.nullcontext():
                results.append(call(rank))
        return results

    def settle(self) -> None:
        """Wait for the device."""
        if self.streams:
            torch.cuda.synchronize(self.device)


class Clock(Protocol):
    """Times calls that launch on several streams."""

    def timed(self, call: Callable[[], T], name: object = None) -> tuple[float, T]:
        """Return the seconds of a call, and what it returned; calls with the same name are alike."""


class RanksClock:
    """Events around a call, before every stream begins and after all have ended, behind flushes of the cache.

    Args:
        ranks: the ranks on whose streams calls launch.
    """

    def __init__(self, ranks: VirtualRanks) -> None:
        self._streams = ranks.streams
        self._buffer = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=ranks.device)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Flushes by name; the host's time of a call that was not timed yet is unknown.
        self._num_flushes: dict[object, int] = {}

    def timed(self, call: Callable[[], T], name: object = None) -> tuple[float, T]:
        """Time a call, with fewer flushes if one of this name was timed before; repeat if the host was too slow.

        Raises:
            AssertionError: the flushes never last as long as the host needs.
        """
        for _ in range(_MOST_TRIES):
            num_flushes = self._num_flushes.get(name, MOST_FLUSHES)
            seconds, result, host_seconds, in_time = self._once(call, num_flushes)
            if in_time:
                if name is not None and name not in self._num_flushes:
                    each = max(self._flush_seconds(), 1e-6)
                    self._num_flushes[name] = min(1 + math.ceil(1.5 * host_seconds / each), MOST_FLUSHES)
                return seconds, result
            self._num_flushes[name] = min(2 * num_flushes, MOST_FLUSHES)
        raise AssertionError(f"the host takes {host_seconds * 1e3:.0f} ms to launch what is timed, longer than flushes")

    def _once(self, call: Callable[[], T], num_flushes: int) -> tuple[float, T, float, bool]:
        main = torch.cuda.current_stream()
        for _ in range(num_flushes):
            self._buffer.zero_()
        self._start.record(main)
        for stream in self._streams:
            stream.wait_event(self._start)
        begin = time.perf_counter()
        result = call()
        for stream in self._streams:
            main.wait_stream(stream)
        host_seconds = time.perf_counter() - begin
        in_time = not self._start.query()
        self._end.record(main)
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1e3, result, host_seconds, in_time

    def _flush_seconds(self) -> float:
        self._start.record()
        self._buffer.zero_()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1e3


@contextlib.contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Fill new memory with NaN, so that elements that are not written are wrong."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def load(call: Callable[[], object], ranks: VirtualRanks) -> None:
    """Compile and load every kernel of ours that a call launches, but launch none; torch's kernels run, on garbage."""

    def loads(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        # Asking a compiled kernel for its launcher loads it.
        assert kernel.warmup(*arguments, grid=grid, **options).run is not None, kernel

    if not ranks.streams:
        return
    with observed(target_of(torch.empty(0, device=ranks.device)), loads):
        call()
    ranks.settle()


def matmul_on(processors: int, a: Tensor, b: Tensor, accumulated: Tensor | None = None) -> Tensor:
    """Multiply with our kernel on part of the processors; if a tensor to add to is given, add to it."""
    config = config_of(a.shape[0], b.shape[1], a.shape[1], a.dtype, target_of(a), num_processors=processors)
    return launch_matmul(
        a, b, out=accumulated, accumulate=accumulated is not None, config=config, processors=processors
    )
