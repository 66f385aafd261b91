"""Where documents begin in the tokens of a file: a sorted list on disk, of which only what is asked for is read."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpengine.data.files.stored_tokens import OpenFile, StoredTokens

_START = np.dtype("<u8")
# Numbers that one read of the search takes: below that a system call costs more than what it brings.
_NUMBERS_AT_ONCE = 64
# A list of so many documents is kept in memory once it was asked for, as long as all such lists together have no more
# than 32 MB: 1,000 files of 4,000 documents. A search in it takes 3 us, in one on disk 10 times as long.
_MOST_KEPT, _ALL_KEPT = 1 << 14, 1 << 22
_num_kept = 0


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
        return DocumentTokens(self.file, self.dtype, plain.offset, len(plain), self.starts, plain.first)
