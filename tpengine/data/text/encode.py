"""Documents as arrays of ids, in the order of the files, with an id before or after each document if one is wanted."""

from __future__ import annotations

import codecs
import struct
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpengine.data.text.documents import Piece
from tpengine.data.text.tokenizer import TextTokenizer
from tpengine.data.text.windows import Joining, Part, Window, cut, encoded

BYTE_VOCAB_SIZE = 256

_LENGTH = struct.Struct("<Q")
_LENGTHS_IN_MEMORY = 8 << 20

# Documents may be a few bytes each, and every array that is written has its price.
_BYTES_PER_ARRAY = 1 << 20
_CHARACTERS_PER_BATCH = 1 << 20


class Lengths:
    """How many tokens each document has, in order; on disk where there are many.

    Iterate over it once, when all are added.
    """

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=_LENGTHS_IN_MEMORY)  # noqa: SIM115  lives as long as this
        self._current = 0

    def add(self, num_tokens: int, *, ends: bool) -> None:
        """Add tokens to the current document, which ends with them or goes on."""
        self._current += num_tokens
        if ends:
            # A document without tokens is none.
            self._file.write(_LENGTH.pack(self._current) if self._current else b"")
            self._current = 0

    def __iter__(self) -> Iterator[int]:
        self._file.seek(0)
        while content := self._file.read(_LENGTH.size << 12):
            yield from (length for (length,) in _LENGTH.iter_unpack(content))


def bytes_of(
    pieces: Iterable[Piece], begin: int | None = None, end: int | None = None, lengths: Lengths | None = None
) -> Iterator[NDArray[Any]]:
    """Yield the bytes of documents as ids.

    Args:
        pieces: of documents, in order.
        begin: id before each document, below 256; None for none.
        end: id after each document, below 256; None for none.
        lengths: is told the tokens of each document.

    Returns:
        Arrays of uint8, about 1 MiB each; where one ends means nothing.
    """
    before, after = (b"" if mark is None else bytes([mark]) for mark in (begin, end))
    gathered = bytearray()
    for piece in pieces:
        had = len(gathered)
        gathered += before if piece.begins else b""
        gathered += piece.content
        gathered += after if piece.ends else b""
        if lengths is not None:
            lengths.add(len(gathered) - had, ends=piece.ends)
        if len(gathered) >= _BYTES_PER_ARRAY:
            yield np.frombuffer(bytes(gathered), dtype=np.uint8)
            gathered.clear()
    if gathered:
        yield np.frombuffer(bytes(gathered), dtype=np.uint8)


def tokens_of(
    pieces: Iterable[Piece],
    tokenizer: TextTokenizer,
    begin: int | None = None,
    end: int | None = None,
    lengths: Lengths | None = None,
) -> Iterator[NDArray[Any]]:
    """Yield the ids of documents: those that the tokenizer gives for the whole document, however long it is.

    Args:
        pieces: of documents, in order; their bytes are UTF-8.
        tokenizer: gives the ids.
        begin: id before each document; None for none.
        end: id after each document; None for none.
        lengths: is told the tokens of each document.

    Returns:
        Arrays of int64; where one ends means nothing.

    Raises:
        ValueError: bytes that are not UTF-8; a document that can be cut nowhere, see windows.py.

    Cost:
        Memory for about a million characters and their encodings, some 100 MB, whatever the length of the text.
    """
    before, after = ([] if mark is None else [mark] for mark in (begin, end))
    joining = Joining(tokenizer)
    for batch in _batches(cut(_decoded(pieces))):
        ids: list[int] = []
        for window, encoding in zip(batch, encoded(tokenizer, batch), strict=True):
            had = len(ids)
            ids += before if window.begins else []
            ids += joining.add(window, encoding)
            ids += after if window.ends else []
            if lengths is not None:
                lengths.add(len(ids) - had, ends=window.ends)
        yield np.array(ids, dtype=np.int64)


def _decoded(pieces: Iterable[Piece]) -> Iterator[Part]:
    """Yield the text of pieces; a character that two of them share belongs to the later one."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for piece in pieces:
        held = len(decoder.getstate()[0])
        try:
            text = decoder.decode(piece.content, final=piece.ends)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"the text must be UTF-8 for a tokenizer: {piece.path}, byte {piece.offset - held + error.start}: "
                f"{error.reason}: convert it, leave it out, or use --tokenizer bytes"
            ) from None
        yield Part(text, piece.begins, piece.ends, piece.path)


def _batches(windows: Iterable[Window]) -> Iterator[list[Window]]:
    """Yield windows in batches, each of which the library encodes with all cores."""
    batch: list[Window] = []
    num_characters = 0
    for window in windows:
        batch.append(window)
        num_characters += len(window.text)
        if num_characters >= _CHARACTERS_PER_BATCH:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch
