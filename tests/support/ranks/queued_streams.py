"""Streams that are threads: memory operations and copies in order, on memory that processes share.

They stand for a GPU's where kernels are interpreted, so that waits by memory operations are tried between processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from tpkernels.exchange.copies import StreamCopies
from tpkernels.exchange.device_arena import DeviceArena
from tpkernels.exchange.stream_waits import StreamWaits
from tpkernels.symmetric.signals import reached
from tpkernels.symmetric.signals_kernel import MAX_WORLD

COPYING, ASIDE = 0, 1


class QueuedStreams:
    """Two streams, by their handles COPYING and ASIDE.

    Attributes:
        written: the addresses and values of all writes that are done, in order.
    """

    def __init__(self) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in (COPYING, ASIDE)]
        self._left: list[Future[None]] = []
        self.written: list[tuple[int, int]] = []

    def submit(self, stream: int, work: Callable[[], Any]) -> None:
        self._left.append(self._threads[stream].submit(work))

    def wait(self, stream: int, address: int, value: int) -> None:
        def until_reached() -> None:
            while not reached(ctypes.c_int32.from_address(address).value, value):
                time.sleep(1e-4)

        self.submit(stream, until_reached)

    def write(self, stream: int, address: int, value: int) -> None:
        def write() -> None:
            ctypes.c_int32.from_address(address).value = value
            self.written.append((address, value))

        self.submit(stream, write)

    def settle(self) -> None:
        """Wait for all that was submitted; raise what it raised."""
        for future in self._left:
            future.result()
        self._left.clear()


class QueuedCopies(StreamCopies):
    """A GPU's copy engine, whose stream is a thread's."""

    def __init__(self, streams: QueuedStreams) -> None:
        self._streams = streams
        self._stream: Any = SimpleNamespace(cuda_stream=COPYING, wait_stream=lambda _: None)
        self._device, self._under_way = torch.device("cpu"), []

    def _copy(self, target: Tensor, source: Tensor) -> None:
        self._streams.submit(COPYING, lambda: torch.no_grad()(target.copy_)(source))

    def join(self) -> None:
        self._streams.settle()
        self._under_way.clear()

    def reset(self) -> None:
        self.join()


def wait_by_streams(arena: DeviceArena) -> tuple[QueuedStreams, Tensor]:
    """Let an arena's copy engine be a thread that waits by memory operations; return the streams, begun and passed."""
    streams, words = QueuedStreams(), torch.zeros(2 * MAX_WORLD, dtype=torch.int32)
    aside = SimpleNamespace(cuda_stream=ASIDE)
    arena.copies = QueuedCopies(streams)
    arena.stream_waits = StreamWaits(streams, arena, arena._record, words, aside)
    return streams, words


@contextlib.contextmanager
def queued_streams() -> Iterator[None]:
    """Let torch name the copying thread's stream where there is no CUDA."""
    stream = SimpleNamespace(cuda_stream=COPYING, wait_stream=lambda _: None)
    with (
        patch.object(torch.cuda, "current_stream", lambda *_: stream),
        patch.object(torch.cuda, "stream", lambda *_: contextlib.nullcontext()),
    ):
        yield
