"""One file of a source, in whatever format: what its opener found, and what identifies it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tpengine.data.files.documents import Starts
from tpengine.data.files.stored_tokens import OpenFile, StoredTokens

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
