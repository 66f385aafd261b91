"""Tokens in a file, read when they are needed.

The file is read, not mapped. If another program cuts a mapped file short, a process that reads the map gets SIGBUS and
ends without a message. A read can report the error in one line, and is about as fast.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.unsignedinteger[Any]]


class FileIdentity(NamedTuple):
    """Tells, without reading, whether a file is still the same and unchanged."""

    size: int
    mtime_ns: int
    inode: int


class OpenFile:
    """A file held open for reading while this object lives: a file renamed over its name does not affect it.

    Args: path: the file.
    Raises: OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)

    def __reduce__(self) -> str:
        raise TypeError(f"an open file cannot be copied to another process: open {self.path} there")

    def identity(self) -> FileIdentity:
        """Return size, time of the last change and inode, as they are now."""
        status = os.fstat(self._descriptor)
        return FileIdentity(status.st_size, status.st_mtime_ns, status.st_ino)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Read at a position; thread-safe. Returns fewer bytes only at the end of the file.

        Raises: OSError: it cannot be read.
        """
        content = os.pread(self._descriptor, num_bytes, offset)
        while 0 < len(content) < num_bytes:
            more = os.pread(self._descriptor, num_bytes - len(content), offset + len(content))
            if not more:
                break
            content += more
        return content


class StoredTokens:
    """A range of the tokens of an open file; a slice reads them from the file.

    Args:
        file: the open file.
        dtype: of a token.
        offset: of the first token, in bytes.
        count: number of tokens.

    Cost: a slice is one system call and a copy: 10 us for 2,049 tokens in the page cache.
    """

    def __init__(self, file: OpenFile, dtype: np.dtype[Any], offset: int, count: int) -> None:
        self.file, self.dtype = file, dtype
        self.offset, self._count = offset, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: slice) -> Tokens:
        """Read tokens[begin:end].

        Returns: a read-only array.
        Raises: ValueError: the file has been cut short or cannot be read; one line with its path.
        """
        begin, end, step = place.indices(self._count)
        assert step == 1, "tokens are read in order"
        return np.frombuffer(self._read(begin, max(begin, end)), self.dtype)

    def part(self, begin: int, end: int) -> StoredTokens:
        """Return tokens[begin:end] without reading them."""
        begin, end, _ = slice(begin, end).indices(self._count)
        return StoredTokens(self.file, self.dtype, self.offset + begin * self.dtype.itemsize, max(0, end - begin))

    def pieces(self, num_tokens: int) -> Iterator[bytes]:
        """Yield all tokens as bytes, in pieces of `num_tokens`.

        Raises: ValueError: as for a slice.
        """
        for begin in range(0, self._count, num_tokens):
            yield self._read(begin, min(begin + num_tokens, self._count))

    def _read(self, begin: int, end: int) -> bytes:
        offset, num_bytes = self.offset + begin * self.dtype.itemsize, (end - begin) * self.dtype.itemsize
        try:
            content = self.file.read(offset, num_bytes)
        except OSError as error:
            raise ValueError(
                f"a token file must be readable: {self.file.path}: {error.strerror}: correct that and continue with "
                "--resume"
            ) from None
        if len(content) < num_bytes:
            raise ValueError(
                f"a token file must not be cut short while it is read: {self.file.path} has "
                f"{self.file.identity().size} bytes now and needs {offset + num_bytes}: restore it and continue with "
                "--resume; rename a new file over it instead of copying"
            )
        return content
