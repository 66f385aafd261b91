"""Whether a copy within the GPU needs its processors: a profile names a copy, and not what makes it.

All processors are occupied by a kernel that does nothing for a while, and a copy is started beside it on another
stream. A copy that ends before that kernel does is made by a copy engine. A kernel that copies must end after it: this
shows that no processor was free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from tpkernels.launch import jit, run
from triton.language.extra.cuda import globaltimer

from benchmarks.gpu.cases.clock import write
from benchmarks.overlap.ranks import VirtualRanks

_OCCUPIED_SECONDS = 20e-3
_WARPS, _THREADS_PER_WARP = 8, 32
# Until the programs are resident.
_START_SECONDS = 2e-3
_BYTES = (64 << 10, 1 << 20, 8 << 20, 64 << 20)


@jit
def occupy_kernel(nanoseconds: tl.int64) -> None:
    """Do nothing for a while."""
    begin = globaltimer()
    while globaltimer() - begin < nanoseconds:
        pass


def occupy(num_threads: int, seconds: float) -> None:
    """Keep this many threads busy for some time, on the current stream."""
    run(occupy_kernel, (num_threads // (_WARPS * _THREADS_PER_WARP),), round(1e9 * seconds), num_warps=_WARPS)


def copies_beside_a_full_gpu(rows: Path, virtual: VirtualRanks, sizes_bytes: Sequence[int] = _BYTES) -> int:
    """Copy from a peer's memory while no processor is free; return 1 if one was free.

    Args:
        rows: gets a row for each size: whether the copy needed processors, and its time alone and beside the kernel.
        virtual: co-located ranks; the first two copy.
        sizes_bytes: of the copies.
    """
    arenas = virtual.arenas(max(sizes_bytes))
    wrong = 0
    for num_bytes in sizes_bytes:
        source = arenas[0].block(1, 0, (num_bytes,), torch.uint8)
        target = torch.empty_like(source)

        def copy(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
            target.copy_(source, non_blocking=True)

        def kernel(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
            torch.bitwise_not(source, out=target)

        # Loaded before anything waits.
        for call in (copy, kernel):
            _timed(call, virtual, 0.0)
        alone, _ = _timed(copy, virtual, 0.0)
        beside, needs_processors = _timed(copy, virtual, _OCCUPIED_SECONDS)
        _, kernel_waited = _timed(kernel, virtual, _OCCUPIED_SECONDS)
        what = "needs processors" if needs_processors else "made by a copy engine"
        fields: dict[str, Any] = {"what": f"copy of {num_bytes} bytes: {what}", "alone_us": alone, "beside_us": beside}
        check = "passed" if kernel_waited else "failed: a kernel ran beside the one that should occupy every processor"
        write(rows, f"what_copies/engine/bytes_{num_bytes}", fields, check)
        wrong |= not kernel_waited
    return int(wrong)


def _timed(call: Callable[[], None], virtual: VirtualRanks, occupied_seconds: float) -> tuple[float, bool]:
    """Return the microseconds of a call on a stream beside an occupied GPU, and whether it ended after that."""
    occupying, copying = virtual.streams[:2]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    free = torch.cuda.Event()
    gpu = torch.cuda.get_device_properties(virtual.device)
    virtual.settle()
    with torch.cuda.stream(occupying):
        occupy(gpu.multi_processor_count * gpu.max_threads_per_multi_processor, occupied_seconds)
        free.record()
    time.sleep(_START_SECONDS)
    with torch.cuda.stream(copying):
        begin.record()
        call()
        end.record()
    end.synchronize()
    ended_after = free.query()
    virtual.settle()
    return 1e3 * begin.elapsed_time(end), ended_after
