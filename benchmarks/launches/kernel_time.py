"""The host's time of a launch of each kernel of a model's step: ours, and triton's own way, in turns.

Kernels, arguments and constants are those of the engine's step (step.py). A launch is made on a GPU that does nothing
(harness/still_gpu.py), so all that the host does in Python is timed, and the driver's part is not.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import NamedTuple

from tpkernels.launch import Target, run

from benchmarks.harness.still_gpu import still_gpu
from benchmarks.launches.compile import specialised
from benchmarks.launches.step import Launch, step_of


class KernelTime(NamedTuple):
    """What a launch of a kernel costs the host.

    Attributes:
        kernel: its name.
        num_variants: of how many compiled variants the step launches some.
        num_arguments: of a launch, with constants.
        host_us, triton_us: our way and triton's own, for the variant that takes ours longest.
    """

    kernel: str
    num_variants: int
    num_arguments: int
    host_us: float
    triton_us: float


def kernel_times(preset: str, num_calls: int) -> list[KernelTime]:
    """Time a launch of every Triton kernel of a step of the preset's model."""
    # A second layer launches the same again.
    launches = [launch for launch in step_of(preset, 1, Target("cuda", 90)) if launch.call is not None]
    variants: dict[str, dict[tuple[object, ...], Launch]] = {}
    for launch in launches:
        assert launch.call is not None
        kernel, _, arguments, options = launch.call
        variants.setdefault(launch.kernel, {}).setdefault(specialised(kernel, arguments, options), launch)
    found = []
    with still_gpu():
        for name, each in sorted(variants.items()):
            times = [_launch_us(launch, num_calls) for launch in each.values()]
            ours, theirs = max(times)
            kernel = next(iter(each.values())).call
            assert kernel is not None
            found.append(KernelTime(name, len(each), len(kernel[0].arg_names), ours, theirs))
    return found


def _launch_us(launch: Launch, num_calls: int) -> tuple[float, float]:
    """Return the microseconds of the fastest launch, ours and triton's, in turns."""
    assert launch.call is not None
    kernel, grid, arguments, options = launch.call

    def ours() -> None:
        run(kernel, grid, *arguments, **options)

    def theirs() -> None:
        kernel[grid](*arguments, **options)

    ways = (ours, theirs)
    for way in ways:  # compile first
        way()
        way()
    gc.collect()
    gc.disable()
    try:
        seconds = [[_seconds(way) for way in ways] for _ in range(num_calls)]
    finally:
        gc.enable()
    fastest = [1e6 * min(of_way) for of_way in zip(*seconds, strict=True)]
    return fastest[0], fastest[1]


def _seconds(way: Callable[[], None]) -> float:
    begin = time.perf_counter()
    way()
    return time.perf_counter() - begin
