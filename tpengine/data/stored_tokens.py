"""Tokens in a file, and where documents begin in them, read when they are needed.

The file is read, not mapped. If another program cuts a mapped file short, a process that reads the map gets SIGBUS and
ends without a message. A read can report the error in one line, and is about as fast.

Documents are a sorted list of their first tokens on disk, of which only what is asked for is read.
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
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.unsignedinteger[Any]]
# So many are opened without a question: a quarter of what systems mostly allow a process that does not ask, 1,024.
_SOME_OPEN = 256
# What is opened beyond that has numbers from 1,024 on: select() knows no larger ones, and others may need it.
_MOST_OPEN, _FIRST_NUMBER = 4096, 1024
_START = np.dtype("<u8")
# Numbers that one read of the search takes: below that a system call costs more than what it brings.
_NUMBERS_AT_ONCE = 64
# A list of so many documents is kept in memory once it was asked for, as long as all such lists together have no more
# than 32 MB: 1,000 files of 4,000 documents. A search in it takes 3 us, in one on disk 10 times as long.
_MOST_KEPT, _ALL_KEPT = 1 << 14, 1 << 22
_num_kept = 0


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

    Attributes:
        columns: those of the whole file that are open, by name, of which a slice is [n] or [n, width] (columns.py).
        written_with: names of the columns that the file says it was written with.

    Cost: a slice is one system call and a copy: 10 us for 2,049 tokens in the page cache.
    """

    columns: Mapping[str, StoredTokens] = MappingProxyType({})
    written_with: tuple[str, ...] = ()

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
        found = StoredTokens(self.file, self.dtype, offset, max(0, end - begin), self.first + begin)
        found.columns = self.columns
        return found

    def read_column(self, name: str, begin: int, end: int) -> NDArray[Any]:
        """Read a column's values of tokens[begin:end], [n] or [n, width]; as a slice."""
        return self.columns[name][self.first + begin : self.first + end]

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


class Starts(ABC):
    """The number of the first token of each document of a text, ascending; the first is 0.

    Documents without tokens are in some formats: two starts may be equal, and the last ones the text's end.
    """

    _kept: NDArray[np.int64] | None = None
    _has_empty = False

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of documents."""

    @abstractmethod
    def __getitem__(self, place: slice) -> NDArray[np.int64]:
        """Read starts[begin:end].

        Raises: ValueError: it cannot be read, or is no list of starts.
        """

    def first_at_or_after(self, token: int) -> int:
        """Return the number of the first document that begins at a token or after it; the count if none does."""
        kept = self._list()
        if kept is not None:
            return int(kept.searchsorted(token))
        low, high = 0, len(self)
        while high - low > _NUMBERS_AT_ONCE:
            middle = (low + high) // 2
            if int(self[middle : middle + 1][0]) < token:
                low = middle + 1
            else:
                high = middle
        return low + int(np.searchsorted(self[low:high], token))

    def between(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return all starts in [begin, end), ascending, each once; they may be read-only.

        Raises: ValueError: as for a slice; starts that do not ascend.
        """
        if end <= begin:
            return np.empty(0, dtype=np.int64)
        kept = self._list()
        if kept is not None:
            found = kept[kept.searchsorted(begin) : kept.searchsorted(end)]
            return _each_once(found) if self._has_empty else found
        first = self.first_at_or_after(begin)
        found = self[first : first + _NUMBERS_AT_ONCE]
        while len(found) and found[-1] < end and first + len(found) < len(self):
            found = np.concatenate([found, self[first + len(found) : first + 2 * len(found)]])
        self.check_ascending(found, first)
        found = found[: int(np.searchsorted(found, end))]
        return _each_once(found)

    def _list(self) -> NDArray[np.int64] | None:
        """Return all starts, if they are few enough to be kept."""
        global _num_kept
        if self._kept is None and len(self) <= _MOST_KEPT and _num_kept + len(self) <= _ALL_KEPT:
            kept = self[0 : len(self)]
            self.check_ascending(kept, 0)
            kept.flags.writeable = False
            self._kept, self._has_empty = kept, bool((kept[1:] == kept[:-1]).any())
            _num_kept += len(kept)
            weakref.finalize(self, _forget, len(kept))
        return self._kept

    def check_ascending(self, starts: NDArray[np.int64], first: int) -> None:
        """Raise ValueError if starts[first], ... are not ascending; the place is said."""
        falls = np.flatnonzero(np.diff(starts) < 0)
        if len(falls):
            at = int(falls[0])
            raise ValueError(
                f"documents must begin one behind the other: {self.path}: document {first + at} begins at token "
                f"{starts[at]} and the next one at {starts[at + 1]}: the file is damaged, write or copy it again"
            )

    @property
    @abstractmethod
    def path(self) -> Path:
        """The file that has them."""


def _each_once(starts: NDArray[np.int64]) -> NDArray[np.int64]:
    return starts[np.diff(starts, prepend=-1) > 0]


def _forget(num: int) -> None:
    global _num_kept
    _num_kept -= num


class DocumentStarts(Starts):
    """Starts as our own files have them.

    Args:
        file: the open file.
        offset: of the list, in bytes.
        count: number of documents.

    Cost: of more than 16,384 documents a search is log2(count / 64) reads of 512 bytes, 20 us for 10**6 in the page
        cache, and no memory.
    """

    def __init__(self, file: OpenFile, offset: int, count: int) -> None:
        self._tokens = StoredTokens(file, _START, offset, count)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, place: slice) -> NDArray[np.int64]:
        return self._tokens[place].astype(np.int64)

    @property
    def path(self) -> Path:
        return self._tokens.file.path


class DocumentTokens(StoredTokens):
    """Tokens of an open file that knows where documents begin.

    Args:
        file, dtype, offset, count: as StoredTokens.
        starts: of the whole file's documents.
        first: number, in the file, of the first token here.
    """

    def __init__(
        self, file: OpenFile, dtype: np.dtype[Any], offset: int, count: int, starts: Starts, first: int = 0
    ) -> None:
        super().__init__(file, dtype, offset, count, first)
        self.starts = starts

    def document_starts(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return the first tokens of all documents that begin in [begin, end), ascending."""
        return self.starts.between(self.first + begin, self.first + min(end, len(self))) - self.first

    def part(self, begin: int, end: int) -> DocumentTokens:
        """Return tokens[begin:end] without reading them."""
        plain = super().part(begin, end)
        found = DocumentTokens(self.file, self.dtype, plain.offset, len(plain), self.starts, plain.first)
        found.columns = self.columns
        return found
