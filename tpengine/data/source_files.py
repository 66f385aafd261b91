"""The files of a source: what the opener of each found and what identifies it, in whatever format; and their tokens,
one behind the other, with the documents that begin in them.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tpengine.data.stored_tokens import OpenFile, Starts, StoredTokens, Tokens

# Of a file whose content has no hash: bytes that identify it at each end, and pieces of its index.
END_BYTES = 1 << 12
_WHOLE_BYTES, _NUM_PIECES = 1 << 16, 16
_START_BYTES = 8


class About(NamedTuple):
    """What a file says besides.

    Attributes:
        begin, end: ids before and after each document; None for none.
        tokenizer: its name; empty where tokens are bytes or came as numbers.
        tokenizer_sha256: of its file, in hex.
        largest: the largest id in the file.
        starts_sha256: of the list of documents, in hex.
    """

    begin: int | None = None
    end: int | None = None
    tokenizer: str = ""
    tokenizer_sha256: str = ""
    largest: int = 0
    starts_sha256: str = ""


class SourceFile(NamedTuple):
    """A file of tokens.

    Attributes:
        path: of the tokens.
        format: what it is, for messages.
        tokens: all of them.
        starts: of its documents; None if it does not know them.
        vocab_size: all ids are said to be below it; 0 if the file does not say.
        about: marks and tokenizer, as far as they are known; largest 0 if it is not.
        sha256: of the tokens, as the file's header has it; empty if it has none.
        fingerprint: in hex, of what identifies the file without reading it: the hashes in its header, else of sizes,
            index and both ends.
    """

    path: Path
    format: str
    tokens: StoredTokens
    starts: Starts | None
    vocab_size: int
    about: About
    sha256: str
    fingerprint: str


def fingerprint_of(*files: OpenFile) -> str:
    """Hash what identifies files whose content has no hash: sizes and both ends; of small ones all.

    Of a file of more than 64 KiB 16 pieces of 4 KiB are read, from its first to its last bytes, evenly apart.
    """
    digest = hashlib.sha256()
    for file in files:
        size = file.identity().size
        digest.update(f"{size} ".encode())
        for begin, end in pieces_of(size):
            digest.update(file.read(begin, end - begin))
    return digest.hexdigest()


def pieces_of(size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of bytes of a file that its fingerprint reads; all begin at multiples of 8, but for the last."""
    if size <= _WHOLE_BYTES:
        yield 0, size
        return
    for number in range(_NUM_PIECES - 1):
        begin = (size - END_BYTES) * number // (_NUM_PIECES - 1) // 8 * 8
        yield begin, begin + END_BYTES
    yield size - END_BYTES, size


def check_pieces(starts: Starts) -> None:
    """Raise ValueError if documents do not begin one behind the other; of a long list in pieces, see pieces_of."""
    for low, high in pieces_of(len(starts) * _START_BYTES):
        first = low // _START_BYTES
        starts.check_ascending(starts[first : high // _START_BYTES + 1], first)


class SourceTokens:
    """A range of the tokens of several files; a slice reads them from the files that it is in.

    Args:
        files: in order.
        first: number of the first token here, of those of all files.
        count: number of tokens here; None for all from the first on.

    Cost: a slice is a search among the files and a read of each that it is in: 15 us for 2,049 tokens of 1,000 files in
        the page cache.
    """

    def __init__(self, files: Sequence[SourceFile], first: int = 0, count: int | None = None) -> None:
        self.files, self.first = files, first
        self._ends = list(accumulate(len(file.tokens) for file in files))
        self._count = self._ends[-1] - first if count is None else count
        self.dtype: np.dtype[Any] = max((file.tokens.dtype for file in files), key=lambda dtype: dtype.itemsize)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: slice) -> Tokens:
        """Read tokens[begin:end].

        Returns: a read-only array.
        Raises: ValueError: a file has been cut short or cannot be read; one line with its path.
        """
        begin, end, step = place.indices(self._count)
        assert step == 1, "tokens are read in order"
        pieces = [self.files[number].tokens[low:high] for number, low, high in self._ranges(begin, end)]
        if len(pieces) == 1 and pieces[0].dtype == self.dtype:
            return pieces[0]
        together = np.concatenate([np.empty(0, self.dtype), *pieces], dtype=self.dtype)
        together.flags.writeable = False
        return together

    def part(self, begin: int, end: int) -> SourceTokens:
        """Return tokens[begin:end] without reading them."""
        begin, end, _ = slice(begin, end).indices(self._count)
        return SourceTokens(self.files, self.first + begin, max(0, end - begin))

    def read_column(self, name: str, begin: int, end: int) -> NDArray[Any]:
        """Read a column's values of tokens[begin:end], [n] or [n, width]; as a slice. All files have it open."""
        return np.concatenate(
            [self.files[number].tokens.read_column(name, low, high) for number, low, high in self._ranges(begin, end)]
        )

    def where(self, token: int) -> tuple[Path, int]:
        """Return the file that a token is in, and its number there."""
        number, low, _ = next(self._ranges(token, token + 1))
        return self.files[number].path, low

    def _ranges(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the number of each file that [begin, end) is in, and the range of its own tokens."""
        begin, end = self.first + begin, self.first + end
        number = bisect_right(self._ends, begin)
        while begin < end:
            file_end = self._ends[number]
            file_begin = file_end - len(self.files[number].tokens)
            upto = min(end, file_end)
            yield number, begin - file_begin, upto - file_begin
            begin, number = upto, number + 1


class DocumentSourceTokens(SourceTokens):
    """Tokens of several files that all know where documents begin; a document ends where its file does.

    Args:
        files, first, count: as SourceTokens.
        starts: of all files' documents.
    """

    def __init__(
        self, files: Sequence[SourceFile], starts: SourceStarts, first: int = 0, count: int | None = None
    ) -> None:
        super().__init__(files, first, count)
        self.starts = starts

    def document_starts(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return the first tokens of all documents that begin in [begin, end), ascending."""
        return self.starts.between(self.first + begin, self.first + min(end, len(self))) - self.first

    def part(self, begin: int, end: int) -> DocumentSourceTokens:
        """Return tokens[begin:end] without reading them."""
        plain = super().part(begin, end)
        return DocumentSourceTokens(self.files, self.starts, plain.first, len(plain))


class SourceStarts(Starts):
    """Starts of the documents of several files, one behind the other.

    Args: files: each knows its documents.
    """

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = files
        self._starts = [file.starts for file in files if file.starts is not None]
        assert len(self._starts) == len(files), "each file knows its documents"
        self._token_ends = list(accumulate(len(file.tokens) for file in files))
        self._ends = list(accumulate(len(starts) for starts in self._starts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, place: slice) -> NDArray[np.int64]:
        begin, end, _ = place.indices(len(self))
        found = [np.empty(0, dtype=np.int64)]
        number = bisect_right(self._ends, begin)
        while begin < end:
            before = self._ends[number] - len(self._starts[number])
            upto = min(end, self._ends[number])
            found.append(self._starts[number][begin - before : upto - before] + self._first_token(number))
            begin, number = upto, number + 1
        return np.concatenate(found)

    def first_at_or_after(self, token: int) -> int:
        number = bisect_right(self._token_ends, token)
        if number == len(self._files):
            return len(self)
        before = self._ends[number] - len(self._starts[number])
        return before + self._starts[number].first_at_or_after(token - self._first_token(number))

    def between(self, begin: int, end: int) -> NDArray[np.int64]:
        found = [np.empty(0, dtype=np.int64)]
        number = bisect_right(self._token_ends, begin)
        if begin < end <= self._token_ends[min(number, len(self._files) - 1)]:
            first = self._first_token(number)
            return self._starts[number].between(begin - first, end - first) + first
        while begin < end and number < len(self._files):
            first = self._first_token(number)
            upto = min(end, self._token_ends[number])
            found.append(self._starts[number].between(begin - first, upto - first) + first)
            begin, number = upto, number + 1
        return np.concatenate(found)

    @property
    def path(self) -> Path:
        return self._files[0].path

    def _first_token(self, number: int) -> int:
        return self._token_ends[number] - len(self._files[number].tokens)
