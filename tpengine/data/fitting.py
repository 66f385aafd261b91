"""Fit documents into samples: which pieces of text share one, so that little of it stays empty; and write the index.

The longest pieces are placed first, each into the sample in which the least room stays behind it; a new sample is begun
only where none has room. Source: Ding et al., "Fewer Truncations Improve Language Modeling", ICML 2024, section 3.

Documents are fitted in windows, one after the other, so that memory does not grow. One text has one index of a length
and a held-out part, so whether an index is right is seen by fitting again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tpengine.data.fit_index import END, HEADER, MAGIC, PIECE, VERSION, FitIndex, identity_of
from tpengine.data.stored_tokens import Starts
from tpengine.data.token_file import TokenFile
from tpengine.files import written_beside

# Documents that are fitted together, and their pieces, for which there must be memory (100 bytes each): enough that
# hardly any room stays, and a fraction of a second each. Other numbers give other samples: indices that are there would
# be called wrong, so they need another VERSION.
WINDOW = 1 << 16
WINDOW_PIECES = 1 << 20


def best_fit(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Put pieces into samples.

    Args:
        lengths: of the pieces, at least 1 and at most `capacity`.
        capacity: tokens of a sample.

    Returns: the sample of each piece, int64; numbered in the order of their first pieces.
    Cost: 1 to 3 us per piece on an AMD EPYC, however long samples are; 0.2 us for one that is a whole sample.
    """
    order = np.argsort(-lengths, kind="stable")
    of_piece = np.empty(len(lengths), dtype=np.int64)
    # Whole samples are the first in that order, and leave no room: a long document has many of them.
    num_samples = int(np.count_nonzero(lengths == capacity))
    of_piece[order[:num_samples]] = np.arange(num_samples)
    order = order[num_samples:]
    # The samples with room, by how much they have, and these rooms in ascending order.
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        place = bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            sample = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        else:
            sample, room = num_samples, capacity
            num_samples += 1
        of_piece[piece] = sample
        left = room - length
        if left in with_room:
            with_room[left].append(sample)
        elif left:
            with_room[left] = [sample]
            insort(rooms, left)
    return _in_order_of_first(of_piece)


def pieces_of(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut documents that are longer than a sample: whole samples from the document's beginning, then what is left.

    Args:
        starts, lengths: of the documents, at least 1 token each.
        capacity: tokens of a sample.

    Returns: starts and lengths of the pieces, and 1 for those behind which their document goes on, else 0; int64.
    """
    of_document = -(-lengths // capacity)
    document = np.repeat(np.arange(len(lengths)), of_document)
    number = np.arange(len(document)) - np.repeat(np.cumsum(of_document) - of_document, of_document)
    behind = lengths[document] - number * capacity
    return starts[document] + number * capacity, np.minimum(behind, capacity), (behind > capacity).astype(np.int64)


def _in_order_of_first(of_piece: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number samples anew in the order of their first pieces: those that are read first must not be the fullest."""
    _, firsts, inverse = np.unique(of_piece, return_index=True, return_inverse=True)
    numbers = np.empty(len(firsts), dtype=np.int64)
    numbers[np.argsort(firsts)] = np.arange(len(firsts))
    return numbers[inverse]


class Fitted(NamedTuple):
    """What was written.

    Attributes:
        num_samples: of what is trained on, and of what is held out.
        num_documents: documents with tokens, and num_cut: those of them that are longer than a sample.
    """

    num_samples: tuple[int, int]
    num_documents: int
    num_cut: int


def write_index(
    path: Path, text: TokenFile, starts: Starts, seq_len: int, num_train: int, tell: Callable[[int], None]
) -> Fitted:
    """Write an index, in one step.

    Args:
        path: of the index; replaced if it is there.
        text, starts: and where its documents begin.
        seq_len: S.
        num_train: tokens that are trained on; the rest is held out.
        tell: called with the number of tokens that are fitted so far.

    Raises:
        ValueError: documents that cannot be read, or do not ascend.
        OSError: the index cannot be written.
    """
    num_tokens, digest = len(text.tokens), hashlib.sha256()
    numbers, num_documents, num_cut = [], 0, 0
    with (
        written_beside(path) as beside,
        beside.open("wb") as file,
        tempfile.TemporaryFile(dir=path.parent) as ends_file,
    ):
        file.write(bytes(HEADER.size))
        for begin, end in ((0, num_train), (num_train, num_tokens)):
            num_pieces = num_samples = 0
            for of_window, lengths in documents_in(starts, begin, end, seq_len):
                pieces, ends = _fitted(of_window - begin, lengths, seq_len)
                digest.update(pieces.data)
                file.write(pieces.data)
                ends_file.write((ends + num_pieces).astype(END).data)
                num_pieces, num_samples = num_pieces + len(pieces), num_samples + len(ends)
                num_documents, num_cut = num_documents + len(lengths), num_cut + int((lengths > seq_len).sum())
                tell(int(of_window[-1] + lengths[-1]))
            numbers += [num_pieces, num_samples]
        ends_file.seek(0)
        while some := ends_file.read(1 << 20):
            digest.update(some)
        ends_file.seek(0)
        shutil.copyfileobj(ends_file, file)
        file.seek(0)
        identity, content = identity_of(text), digest.digest()
        file.write(HEADER.pack(MAGIC, VERSION, seq_len, num_tokens, num_train, *numbers, identity, content))
        file.flush()
        os.fsync(file.fileno())
    return Fitted((numbers[1], numbers[3]), num_documents, num_cut)


def is_fitted(index: FitIndex, starts: Starts) -> bool:
    """Whether an index has what fitting its text gives, piece by piece.

    Args:
        index: of the text.
        starts: where the text's documents begin.

    Raises:
        ValueError: documents or an index that cannot be read, or documents that do not ascend.
    Cost: that of fitting, and a read of the index.
    """
    if index.held_out.num_tokens < 0:
        # Its header says that it trains on more tokens than there are.
        return False
    begin = 0
    for part in (index.train, index.held_out):
        num_pieces = num_samples = 0
        for of_window, lengths in documents_in(starts, begin, begin + part.num_tokens, index.seq_len):
            pieces, ends = _fitted(of_window - begin, lengths, index.seq_len)
            of_pieces = slice(num_pieces, num_pieces + len(pieces))
            of_samples = slice(num_samples, num_samples + len(ends))
            if part.pieces[of_pieces].tobytes() != pieces.tobytes():
                return False
            if part.ends[of_samples].tobytes() != (ends + num_pieces).astype(END).tobytes():
                return False
            num_pieces, num_samples = of_pieces.stop, of_samples.stop
        if (num_pieces, num_samples) != (len(part.pieces), len(part.ends)):
            return False
        begin += part.num_tokens
    return True


def documents_in(
    starts: Starts, begin: int, end: int, seq_len: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield starts and lengths of the documents in [begin, end), a window at a time; empty ones are left out.

    A file of one document is cut inside it: then its second part begins at `begin`. seq_len, the tokens of a sample,
    bounds the pieces of a window.
    """
    first, last = starts.first_at_or_after(begin + 1) - 1, starts.first_at_or_after(end)
    for low in range(first, last, WINDOW):
        high = min(low + WINDOW, last)
        edges = np.array(starts[low : high + 1])
        starts.check_ascending(edges, low)
        edges = np.append(edges[: high - low], end if high == last else edges[-1])
        edges[0] = max(int(edges[0]), begin)
        lengths = np.diff(edges)
        yield from _of_few_pieces(edges[:-1][lengths > 0], lengths[lengths > 0], seq_len)


def _of_few_pieces(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], seq_len: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the documents in parts of at most WINDOW_PIECES pieces, or of one document."""
    num_pieces = np.cumsum(-(-lengths // seq_len))
    first = before = 0
    while first < len(lengths):
        last = max(first + 1, int(np.searchsorted(num_pieces, before + WINDOW_PIECES, side="right")))
        yield starts[first:last], lengths[first:last]
        first, before = last, int(num_pieces[last - 1])


def _fitted(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], seq_len: int
) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    """Fit the documents of a window.

    Returns: the pieces of all samples, in order, as the file has them; the end of each sample's.
    """
    of_piece = pieces_of(starts, lengths, seq_len)
    sample = best_fit(of_piece[1], seq_len)
    # Within a sample the pieces are in the order of the text.
    order = np.argsort(sample, kind="stable")
    pieces = np.empty(len(order), dtype=PIECE)
    for name, values in zip(("start", "length", "goes_on"), of_piece, strict=True):
        pieces[name] = values[order]
    return pieces, np.cumsum(np.bincount(sample))
