"""How far a command has come that writes many bytes: one line that updates in place, on standard error.

Where standard error is no terminal, a line every half minute. Work that is done sooner says nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TextIO, cast

from torch import Tensor

from tpengine.dtypes import FILE_BITS
from tpengine.hugging_face.write import TensorToWrite
from tpengine.terminal import escaped, raw

# Between two lines: on a terminal, where they replace each other, and elsewhere.
_TERMINAL_SECONDS, _PLAIN_SECONDS = 0.5, 30.0


class ByteProgress:
    """Says how many bytes are done, and how long the rest will take.

    Args:
        what: is done, in words.
        num_bytes: in all.
        stream: to write to.
        clock: seconds that only grow.
    """

    def __init__(self, what: str, num_bytes: int, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._num_bytes, self._stream, self._clock = what, num_bytes, stream, clock
        self._done, self._width = 0, 0
        self._begin = self._said = clock()
        self._replaces = stream.isatty()

    def add(self, num_bytes: int) -> None:
        """Count bytes that are done, and say so if it is time."""
        self._done += num_bytes
        now = self._clock()
        if now - self._said < (_TERMINAL_SECONDS if self._replaces else _PLAIN_SECONDS):
            return
        self._said = now
        left = (now - self._begin) * (self._num_bytes - self._done) / max(1, self._done)
        line = f"{self._what}: {self._done / 1e9:.1f} of {self._num_bytes / 1e9:.1f} GB, {left:.0f} s left"
        if self._replaces:
            self._stream.write(f"\r{line.ljust(self._width)}")
            self._width = len(line)
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()

    def end(self) -> None:
        """Remove the line."""
        if self._width:
            self._stream.write(f"\r{' ' * self._width}\r")
            self._stream.flush()


@contextmanager
def shown(tensors: Sequence[TensorToWrite], what: str) -> Iterator[list[TensorToWrite]]:
    """Give the same tensors, whose blocks are counted as they are asked for.

    Args:
        tensors: to write.
        what: is done with them, in words.
    """
    progress = ByteProgress(escaped(what), sum(tensor.num_bytes for tensor in tensors), cast(TextIO, raw(sys.stderr)))
    try:
        yield [replace(tensor, blocks=partial(_counted, tensor, progress)) for tensor in tensors]
    finally:
        progress.end()


def _counted(tensor: TensorToWrite, progress: ByteProgress) -> Iterable[Tensor]:
    for block in tensor.blocks():
        yield block
        progress.add(block.numel() * FILE_BITS[tensor.dtype] // 8)
