"""A kernel of one program that waits on a stream until ranks have published, so that copies behind it may read."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tpkernels.launch import Launches, jit, tl
from tpkernels.symmetric.signals_kernel import control_at, epoch_of, published_line, report, wait


class ControlArea(Protocol):
    """A control area of signals between `world` ranks: the tensor `control`, its address for kernels, its launches."""

    @property
    def address(self) -> int: ...

    @property
    def control(self) -> Tensor: ...

    @property
    def launches(self) -> Launches: ...

    @property
    def world(self) -> int: ...


@jit(do_not_specialize=["first", "count", "world", "generation", "call"])
def wait_kernel(
    control: tl.int64,
    first: tl.int32,
    count: tl.int32,
    world: tl.int32,
    generation: tl.int32,
    call: tl.int32,
) -> None:
    """Wait until the blocks of `count` ranks from `first` on may be read, in the newest call of a generation."""
    p_control = control_at(control)
    epoch = epoch_of(p_control, generation)
    for i in range(count):
        peer = (first + i) % world
        wait(p_control, peer, published_line(peer), epoch, call)
    # A peer may have given up, run on and raised these flags with garbage. It poisoned the group before that, so the
    # host is told here.
    report(p_control)


def launch_wait(area: ControlArea, first: int, count: int, generation: int, call: int) -> None:
    """Wait on the current stream for `count` ranks from `first` on; arguments as wait_kernel's."""
    key = "wait", first, count, generation
    numbers = area.address, first, count, area.world, generation, call
    with torch.cuda.device_of(area.control):
        if not area.launches.again(key, call):
            area.launches.first(key, {}, wait_kernel, (1,), *numbers, num_warps=1)
