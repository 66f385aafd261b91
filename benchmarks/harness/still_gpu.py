"""A GPU that does nothing: triton binds and launches kernels as for sm_90, and calls of the driver return at once.

So the host's part of a launch can be timed without a GPU: triton compiles each kernel, binds its arguments and builds
its descriptors. What the driver itself would take (about 3 us per launch, 5 us per copy) is not in it. Tensors lie on
the CPU; keep them small, since torch really copies them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from tpkernels.exchange.copies import StreamCopies
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

_SHARED_BYTES = 227 << 10
_THREADS = 1024


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _launch(*arguments: Any) -> None:
    # Kernels keep this function for as long as they live, also when another still GPU has come.
    triton.runtime.driver.active.launched(*arguments[:3], *arguments[-1])


class _StillDriver:
    """What triton asks of its driver, for one sm_90."""

    def __init__(self, launched: Callable[..., None]) -> None:
        self.utils = SimpleNamespace(
            launch=_launch,
            load_binary=lambda *_: (0, 0, 0, 0, _THREADS),
            get_device_properties=lambda _: {"max_shared_mem": _SHARED_BYTES},
            build_signature_metadata=_nothing,
            fill_tma_descriptor_tiled=lambda *described: described,
        )
        self.launcher_cls = nvidia.CudaLauncher
        self.launched = launched

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


class _StillStream:
    """A stream on which nothing is ever under way."""

    wait_stream = staticmethod(_nothing)


class StillCopies(StreamCopies):
    """A GPU's copy engine whose stream is still; copies are made by torch, at once."""

    def __init__(self) -> None:
        self._stream: Any = _StillStream()
        self._device = torch.device("cpu")
        self._under_way = []

    def reset(self) -> None:
        self._under_way.clear()


@contextlib.contextmanager
def still_streams() -> Iterator[None]:
    """Let copy engines work where there is no CUDA."""
    stream = _StillStream()
    with (
        patch.object(torch.cuda, "current_stream", lambda *_: stream),
        patch.object(torch.cuda, "stream", lambda *_: contextlib.nullcontext()),
    ):
        yield


def why_not_still() -> str | None:
    """Return why triton's launches cannot be made on a GPU that does nothing; None if they can."""
    if hasattr(nvidia, "PyKernelArg"):
        return None
    return f"triton {triton.__version__} compiles a launcher for each kernel, which calls the driver: use triton 3.7"


@contextlib.contextmanager
def still_gpu(launched: Callable[..., None] = _nothing) -> Iterator[None]:
    """Let triton launch on a GPU that does nothing.

    Args:
        launched: is called with the grid and the arguments of each launch.

    Raises:
        RuntimeError: triton is older than 3.7.
    """
    if reason := why_not_still():
        raise RuntimeError(reason)
    kinds: dict[str, Any] = {name: getattr(nvidia, name) or 0 for name in ("ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE")}
    before = triton.runtime.driver._active
    with (
        patch.multiple(nvidia, PyKernelArg=SimpleNamespace, **kinds),
        still_streams(),
    ):
        triton.runtime.driver.set_active(_StillDriver(launched))
        try:
            yield
        finally:
            triton.runtime.driver._active = before
