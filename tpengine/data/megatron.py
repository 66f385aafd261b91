"""Megatron's indexed data sets: `NAME.bin` has ids one behind the other, `NAME.idx` where sequences and documents are.

The index, little-endian: 9 bytes MMIDIDX and two zeros, version 1 (8 bytes), code of the ids' type (1), numbers of
sequences S and of documents' borders D (8 each); then S lengths in ids (int32), S places in bytes (int64), D numbers of
sequences (int64): document d has the sequences from border d to border d + 1. Behind them is a byte per sequence where
pictures are among them, which we refuse.

Source: megatron.core.datasets.indexed_dataset of Megatron-LM, as it is in 2026.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpengine.data.foreign import REMEDY, open_foreign, read_foreign, size_of_foreign
from tpengine.data.source_files import About, SourceFile, fingerprint_of, pieces_of
from tpengine.data.stored_tokens import OpenFile, Starts, StoredTokens

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\0\0"
# Ids are never below 0, so that the types with a sign are read without: what is damaged is found beyond the vocabulary.
_DTYPES: Mapping[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    3: np.dtype("<u2"),
    4: np.dtype("<u4"),
    5: np.dtype("<u8"),
    8: np.dtype("<u2"),
}
_LENGTH, _PLACE = np.dtype("<i4"), np.dtype("<i8")
_MOST_SPREAD = 64


def is_megatron(path: Path) -> bool:
    """Whether a file of tokens has Megatron's index beside."""
    return path.suffix == ".bin" and path.with_suffix(".idx").is_file()


def open_megatron(path: Path) -> SourceFile:
    """Open `NAME.bin` after checking its index, of which pieces are read.

    Raises:
        ValueError: an index that does not fit the file, in one line.
    """
    index = open_foreign(path.with_suffix(".idx"), "Megatron's index")
    file = open_foreign(path, "a token file")
    header = read_foreign(index, 0, _HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise ValueError(f"Megatron's index starts with {_MAGIC!r}: {index.path} with {header[:9]!r}: {REMEDY}")
    _, version, code, num_sequences, num_borders = _HEADER.unpack(header)
    if version != 1:
        raise ValueError(f"Megatron's index must be of version 1: {index.path} has {version}: {REMEDY}")
    if code not in _DTYPES:
        raise ValueError(
            f"Megatron's ids must be uint8, int16, int32, int64 or uint16, codes {', '.join(map(str, _DTYPES))}: "
            f"{index.path} has code {code}: {REMEDY}"
        )
    size, dtype = size_of_foreign(index), _DTYPES[code]
    expected = _HEADER.size + num_sequences * (_LENGTH.itemsize + _PLACE.itemsize) + num_borders * _PLACE.itemsize
    if num_sequences and size == expected + num_sequences:
        raise ValueError(
            f"Megatron's index must be of text alone: {index.path} says of each of its {num_sequences} sequences "
            "whether it is a picture: choose another"
        )
    if size != expected:
        raise ValueError(
            f"Megatron's index of {num_sequences} sequences and {num_borders} borders of documents has {expected} "
            f"bytes: {index.path} has {size}, {'cut short' if size < expected else 'damaged'}: {REMEDY}"
        )
    num_bytes = size_of_foreign(file)
    if num_borders < 2 or not num_sequences or not num_bytes:
        raise ValueError(
            f"a token file must hold at least 1 token in a document: {path} has {num_bytes} bytes, {num_sequences} "
            f"sequences and {num_borders} borders of documents: leave it out"
        )
    starts = MegatronStarts(index, dtype.itemsize, num_sequences, num_borders)
    starts.check_pieces(num_bytes)
    tokens = StoredTokens(file, dtype, 0, num_bytes // dtype.itemsize)
    return SourceFile(path, "Megatron", tokens, starts, 0, About(), "", fingerprint_of(file, index))


class MegatronStarts(Starts):
    """Starts of documents by way of their first sequences.

    Args:
        index: the open index.
        itemsize: bytes of an id.
        num_sequences, num_borders: S and D.

    Cost: twice the reads of DocumentStarts, no memory.
    """

    def __init__(self, index: OpenFile, itemsize: int, num_sequences: int, num_borders: int) -> None:
        lengths, self._itemsize = _HEADER.size, itemsize
        places = lengths + num_sequences * _LENGTH.itemsize
        borders = places + num_sequences * _PLACE.itemsize
        self._lengths = StoredTokens(index, _LENGTH, lengths, num_sequences)
        self._places = StoredTokens(index, _PLACE, places, num_sequences)
        self._borders = StoredTokens(index, _PLACE, borders, num_borders)

    def __len__(self) -> int:
        return len(self._borders) - 1

    def __getitem__(self, place: slice) -> NDArray[np.int64]:
        begin, end, _ = place.indices(len(self))
        first = self._borders[begin : max(begin, end)].astype(np.int64)
        if not len(first):
            return first
        low, high = int(first.min()), int(first.max())
        num_sequences = len(self._places)
        if low < 0 or high > num_sequences:
            raise ValueError(
                f"Megatron's documents must begin at one of its {num_sequences} sequences: {self.path}: one of "
                f"documents {begin} to {end - 1} at {low if low < 0 else high}: {REMEDY}"
            )
        if high - low <= _MOST_SPREAD * len(first):
            places = self._place_of(low, high + 1)[first - low]
        else:
            places = np.concatenate([self._place_of(number, number + 1) for number in first.tolist()])
        if (places % self._itemsize).any() or places.min() < 0:
            raise ValueError(
                f"Megatron's documents must begin at whole ids of {self._itemsize} bytes: {self.path}: one of "
                f"documents {begin} to {end - 1} does not: {REMEDY}"
            )
        return places // self._itemsize

    @property
    def path(self) -> Path:
        return self._places.file.path

    def _place_of(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return where sequences begin, in bytes; one behind the last is where all end."""
        places = self._places[begin:end].astype(np.int64)
        if end > len(self._places):
            last, length = self._places[-1:].astype(np.int64), self._lengths[-1:].astype(np.int64)
            places = np.append(places, last + length * self._itemsize)
        return places

    def check_pieces(self, num_bytes: int) -> None:
        """Check the pieces of the index that its fingerprint reads; a small index as a whole.

        Args: num_bytes: of the ids.
        Raises: ValueError: sequences or documents that are not one behind the other, from the first id to the last.
        """
        num_sequences = len(self._places)
        ends = int(self._places[-1:][0]) + int(self._lengths[-1:][0]) * self._itemsize
        if int(self._places[:1][0]) != 0 or ends != num_bytes:
            raise ValueError(
                f"Megatron's sequences must be all of its ids: {self.path} has them from byte "
                f"{self._places[:1][0]} to {ends} of {num_bytes}, "
                f"{'ids are cut short' if num_bytes < ends else 'of other files'}: {REMEDY}"
            )
        if int(self._borders[:1][0]) != 0 or int(self._borders[-1:][0]) != num_sequences:
            raise ValueError(
                f"Megatron's documents must be all of its {num_sequences} sequences: {self.path} has them from "
                f"sequence {self._borders[:1][0]} to {self._borders[-1:][0]}: {REMEDY}"
            )
        for low, high in pieces_of(num_sequences * _PLACE.itemsize):
            self.check_sequences(low // _PLACE.itemsize, high // _PLACE.itemsize)
        for low, high in pieces_of(len(self._borders) * _PLACE.itemsize):
            self.check_borders(low // _PLACE.itemsize, high // _PLACE.itemsize)

    def check_sequences(self, begin: int, end: int) -> None:
        """Raise ValueError unless sequences begin, begin + 1, ... and the one behind them follow each other."""
        places = self._places[begin : end + 1].astype(np.int64)
        lengths = self._lengths[begin : begin + max(0, len(places) - 1)].astype(np.int64)
        wrong = np.flatnonzero((np.diff(places) != lengths * self._itemsize) | (lengths < 0))
        if len(wrong):
            at = int(wrong[0])
            raise ValueError(
                f"Megatron's sequences must follow each other: {self.path}: sequence {begin + at} of {lengths[at]} ids "
                f"of {self._itemsize} bytes begins at byte {places[at]} and the next one at {places[at + 1]}: {REMEDY}"
            )

    def check_borders(self, begin: int, end: int) -> None:
        """Raise ValueError unless borders begin, begin + 1, ... and the one behind them ascend."""
        borders = self._borders[begin : end + 1].astype(np.int64)
        wrong = np.flatnonzero(np.diff(borders) < 0)
        if len(wrong):
            at = int(wrong[0])
            raise ValueError(
                f"documents must begin one behind the other: {self.path}: document {begin + at} begins with sequence "
                f"{borders[at]} and the next one with {borders[at + 1]}: {REMEDY}"
            )
