"""Documents as ids, in the order of the files, with an id before or after each document if one is wanted."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tpengine.data.documents import DocumentPiece, DocumentPlace
from tpengine.data.windows import Encoded, Joining, TextPart, Window, cut, encoded
from tpengine.tokenizer import TextTokenizer

BYTE_VOCAB_SIZE = 256

# Documents may be a few bytes each, and every array that is written has its price.
_BYTES_PER_ARRAY = 1 << 20
_CHARACTERS_PER_BATCH = 1 << 20


class TokenChunk(NamedTuple):
    """Ids of documents, in order; where a chunk ends means nothing.

    Attributes:
        ids: any unsigned integers.
        ends: where documents end in them, ascending; what is behind the last belongs to one that goes on.
        after: of each that ends here, where reading goes on.
    """

    ids: NDArray[Any]
    ends: list[int]
    after: list[DocumentPlace]


class EncodedBatch(NamedTuple):
    """The ids of windows, one behind the other.

    Attributes:
        ids: of all windows, uint32.
        counts: of each window.
        offsets: of each id, its first character and the one after its last; None if no document has several windows.
        words: of each id, the number of its word, -1 for none; None with offsets.
    """

    ids: NDArray[np.uint32]
    counts: NDArray[np.int64]
    offsets: NDArray[np.int32] | None = None
    words: NDArray[np.int32] | None = None


Encode = Callable[[Iterable[list[Window]]], Iterator[tuple[list[Window], EncodedBatch]]]


def bytes_of(pieces: Iterable[DocumentPiece], begin: int | None = None, end: int | None = None) -> Iterator[TokenChunk]:
    """Yield the bytes of documents as ids.

    Args:
        pieces: of documents, in order.
        begin: id before each document, below 256; None for none.
        end: id after each document, below 256; None for none.

    Returns:
        Chunks of uint8, about 1 MiB each.
    """
    before, after = (b"" if mark is None else bytes([mark]) for mark in (begin, end))
    gathered, ends, places = bytearray(), list[int](), list[DocumentPlace]()
    for piece in pieces:
        gathered += before if piece.begins else b""
        gathered += piece.content
        if piece.ends:
            gathered += after
            ends.append(len(gathered))
            places.append(piece.after)
        if len(gathered) >= _BYTES_PER_ARRAY:
            yield TokenChunk(np.frombuffer(bytes(gathered), dtype=np.uint8), ends, places)
            gathered, ends, places = bytearray(), [], []
    if gathered:
        yield TokenChunk(np.frombuffer(bytes(gathered), dtype=np.uint8), ends, places)


def tokens_of(
    pieces: Iterable[DocumentPiece],
    tokenizer: TextTokenizer,
    begin: int | None = None,
    end: int | None = None,
    encode: Encode | None = None,
) -> Iterator[TokenChunk]:
    """Yield the ids of documents: those that the tokenizer gives for the whole document, however long it is.

    Args:
        pieces: of documents, in order; their bytes are UTF-8.
        tokenizer: gives the ids.
        begin: id before each document; None for none.
        end: id after each document; None for none.
        encode: encodes batches of windows, in order; None for this process.

    Returns:
        Chunks of uint32, whose ids do not depend on who encodes.

    Raises:
        ValueError: bytes that are not UTF-8; a document that can be cut nowhere, see windows.py.

    Cost:
        Memory for about a million characters and their encodings, some 100 MB, whatever the length of the text.
    """
    joining = Joining(tokenizer)
    here = encode or (lambda batches: ((batch, encode_windows(tokenizer, batch)) for batch in batches))
    for windows, batch in here(_batches(cut(_decoded(pieces)))):
        if batch.offsets is None:
            yield _whole(windows, batch, begin, end)
        else:
            yield _joined(windows, batch, joining, begin, end)


def encode_windows(tokenizer: TextTokenizer, windows: list[Window]) -> EncodedBatch:
    """Encode windows, with places where a document has several."""
    encodings = encoded(tokenizer, windows)
    ids: list[int] = []
    counts = []
    for encoding in encodings:
        of_window = encoding.ids
        ids += of_window
        counts.append(len(of_window))
    plain = EncodedBatch(np.array(ids, dtype=np.uint32), np.array(counts, dtype=np.int64))
    if all(window.begins and window.ends for window in windows):
        return plain
    offsets = [place for encoding in encodings for place in encoding.offsets]
    words = [-1 if word is None else word for encoding in encodings for word in encoding.word_ids]
    return plain._replace(
        offsets=np.array(offsets, dtype=np.int32).reshape(-1, 2), words=np.array(words, dtype=np.int32)
    )


def _whole(windows: list[Window], batch: EncodedBatch, begin: int | None, end: int | None) -> TokenChunk:
    """Return the ids of windows that are a document each, with marks."""
    ends = np.cumsum(batch.counts)
    ids = batch.ids
    num_marks = (begin is not None) + (end is not None)
    if num_marks:
        starts = ends - batch.counts
        # Document by document: at one place the end of a document goes before the begin of the next.
        wanted = [(place, mark) for place, mark in ((starts, begin), (ends, end)) if mark is not None]
        places = np.stack([place for place, _ in wanted], axis=1).reshape(-1)
        ids = np.insert(ids, places, np.tile([mark for _, mark in wanted], len(windows)).astype(np.uint32))
        ends = ends + num_marks * np.arange(1, len(windows) + 1)
    return TokenChunk(ids, ends.tolist(), [window.after for window in windows])


def _joined(
    windows: list[Window], batch: EncodedBatch, joining: Joining, begin: int | None, end: int | None
) -> TokenChunk:
    """Return the ids of windows of which some are parts of a document."""
    assert batch.offsets is not None and batch.words is not None
    before, after = ([] if mark is None else [mark] for mark in (begin, end))
    ids: list[int] = []
    ends, places, first = [], [], 0
    for window, count in zip(windows, batch.counts.tolist(), strict=True):
        last = first + count
        offsets = [(low, high) for low, high in batch.offsets[first:last].tolist()]
        words = [None if word < 0 else word for word in batch.words[first:last].tolist()]
        encoding = Encoded(batch.ids[first:last].tolist(), offsets, words)
        first = last
        ids += before if window.begins else []
        ids += joining.add(window, encoding)
        if window.ends:
            ids += after
            ends.append(len(ids))
            places.append(window.after)
    return TokenChunk(np.array(ids, dtype=np.uint32), ends, places)


def _decoded(pieces: Iterable[DocumentPiece]) -> Iterator[TextPart]:
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
        yield TextPart(text, piece.begins, piece.ends, piece.path, piece.after)


def _batches(windows: Iterable[Window]) -> Iterator[list[Window]]:
    """Yield windows in batches, each of which is encoded at once."""
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
