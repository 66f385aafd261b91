"""Documents as arrays of ids, in the order of the files, with an id before or after each document if one is wanted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpengine.data.text.documents import Piece

BYTE_VOCAB_SIZE = 256

# Documents may be a few bytes each, and every array that is written has its price.
_BYTES_PER_ARRAY = 1 << 20


def bytes_of(pieces: Iterable[Piece], begin: int | None = None, end: int | None = None) -> Iterator[NDArray[Any]]:
    """Yield the bytes of documents as ids.

    Args:
        pieces: of documents, in order.
        begin: id before each document, below 256; None for none.
        end: id after each document, below 256; None for none.

    Returns:
        Arrays of uint8, about 1 MiB each; where one ends means nothing.
    """
    before, after = (b"" if mark is None else bytes([mark]) for mark in (begin, end))
    gathered = bytearray()
    for piece in pieces:
        gathered += before if piece.begins else b""
        gathered += piece.content
        gathered += after if piece.ends else b""
        if len(gathered) >= _BYTES_PER_ARRAY:
            yield np.frombuffer(bytes(gathered), dtype=np.uint8)
            gathered.clear()
    if gathered:
        yield np.frombuffer(bytes(gathered), dtype=np.uint8)
