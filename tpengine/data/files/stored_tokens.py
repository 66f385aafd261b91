"""Tokens in a file, read when they are needed.

The file is read, not mapped. If another program cuts a mapped file short, a process that reads the map gets SIGBUS and
ends without a message. A read can report the error in one line, and is about as fast.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import resource
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.unsignedinteger[Any]]

# So many are opened without a question: a quarter of what systems mostly allow a process that does not ask, 1,024.
_SOME_OPEN = 256
# What is opened beyond that has numbers from 1,024 on: select() knows no larger ones, and others may need it.
_MOST_OPEN, _FIRST_NUMBER = 4096, 1024


class FileIdentity(NamedTuple):
    """Tells, without reading, whether a file is still the same and unchanged."""

    size: int
    mtime_ns: int
    inode: int


class _Descriptor:
    """What the system knows an open file by; -1 while it is closed.

    Attributes:
        users: reads that are under way; it is not closed meanwhile.
    """

    __slots__ = ("number", "users")

    def __init__(self, number: int) -> None:
        self.number, self.users = number, 0


# Files are read by the trainer, by the thread that reads ahead and by the one that checks contents.
_LOCK = threading.RLock()
# What is open, the one used longest ago first.
_OPEN: OrderedDict[int, _Descriptor] = OrderedDict()


class OpenFile:
    """A file for reading, while this object lives.

    A file that is renamed over its name does not affect it. Of more than 4,096 files, or of as many as the system lets
    this process have open, those that were used longest ago are closed and opened again when they are needed: then the
    name must still be that of the same file.

    Args: path: the file.
    Raises: OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = _Descriptor(_open(path))
        status = os.fstat(self._descriptor.number)
        self._is = status.st_dev, status.st_ino
        weakref.finalize(self, _close, self._descriptor)
        with _LOCK:
            _used_now(self._descriptor)

    def __reduce__(self) -> str:
        raise TypeError(f"an open file cannot be copied to another process: open {self.path} there")

    def identity(self) -> FileIdentity:
        """Return size, time of the last change and inode, as they are now."""
        number = self._take()
        try:
            status = os.fstat(number)
        finally:
            self._give()
        return FileIdentity(status.st_size, status.st_mtime_ns, status.st_ino)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Read at a position; thread-safe. Returns fewer bytes only at the end of the file.

        Raises: OSError: it cannot be read.
        """
        number = self._take()
        try:
            content = os.pread(number, num_bytes, offset)
            while 0 < len(content) < num_bytes:
                more = os.pread(number, num_bytes - len(content), offset + len(content))
                if not more:
                    break
                content += more
        finally:
            self._give()
        return content

    def _take(self) -> int:
        """Return the descriptor, which stays open until `_give`."""
        with _LOCK:
            if self._descriptor.number < 0:
                number = _open(self.path)
                status = os.fstat(number)
                if (status.st_dev, status.st_ino) != self._is:
                    os.close(number)
                    raise OSError(errno.ESTALE, "was replaced by another file while it was in use", str(self.path))
                self._descriptor.number = number
            self._descriptor.users += 1
            _used_now(self._descriptor)
            return self._descriptor.number

    def _give(self) -> None:
        with _LOCK:
            self._descriptor.users -= 1


def _open(path: Path) -> int:
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if len(_OPEN) < _SOME_OPEN or _most_open() <= _SOME_OPEN:
        return number
    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _FIRST_NUMBER)
    finally:
        os.close(number)


@functools.cache
def _most_open() -> int:
    """Return how many files may be open at once, and have the system allow this process so many if it can."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * _FIRST_NUMBER + _MOST_OPEN
    if most != resource.RLIM_INFINITY:
        wanted = min(wanted, most)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
            allowed = wanted
    if allowed == resource.RLIM_INFINITY:
        return _MOST_OPEN
    return max(_SOME_OPEN, min(_MOST_OPEN, allowed - 2 * _FIRST_NUMBER))


def _used_now(descriptor: _Descriptor) -> None:
    """Note a use; close what was used longest ago if too much is open. The caller has the lock."""
    _OPEN[id(descriptor)] = descriptor
    _OPEN.move_to_end(id(descriptor))
    if len(_OPEN) <= _SOME_OPEN or len(_OPEN) <= _most_open():
        return
    # Of a copy: a file that is dropped meanwhile takes itself out and closes itself, in any line of this thread.
    for key in list(_OPEN):
        surplus = _OPEN.get(key)
        if surplus is None or surplus is descriptor or surplus.users:
            continue
        _OPEN.pop(key, None)
        number, surplus.number = surplus.number, -1
        if number >= 0:
            os.close(number)
        return


def _close(descriptor: _Descriptor) -> None:
    """Close a file that nobody holds any more."""
    # This may run inside any line of a thread that has the lock.
    with _LOCK:
        _OPEN.pop(id(descriptor), None)
        number, descriptor.number = descriptor.number, -1
    if number >= 0:
        os.close(number)


class StoredTokens:
    """A range of the tokens of an open file; a slice reads them from the file.

    Args:
        file: the open file.
        dtype: of a token.
        offset: of the first token, in bytes.
        count: number of tokens.
        first: number, in the file, of the first token here.

    Cost: a slice is one system call and a copy: 10 us for 2,049 tokens in the page cache.
    """

    def __init__(self, file: OpenFile, dtype: np.dtype[Any], offset: int, count: int, first: int = 0) -> None:
        self.file, self.dtype, self.first = file, dtype, first
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
        offset = self.offset + begin * self.dtype.itemsize
        return StoredTokens(self.file, self.dtype, offset, max(0, end - begin), self.first + begin)

    def where(self, token: int) -> tuple[Path, int]:
        """Return the file that a token is in, and its number there."""
        return self.file.path, self.first + token

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
            try:
                has = f"{self.file.identity().size}"
            except OSError:
                # It had to be opened again, and its name is that of another file or of none.
                has = f"at most {offset + len(content)}"
            raise ValueError(
                f"a token file must not be cut short while it is read: {self.file.path} has {has} "
                f"bytes now and needs {offset + num_bytes}: restore it and continue with --resume; rename a new file "
                "over it instead of copying"
            )
        return content
