"""The index of fitted samples: which pieces of documents each sample is, read a sample at a time.

It is a file beside the first token file of a text, NAME.S.fit: a header of 128 bytes (magic, version, S, tokens of the
text and of its training part, number of pieces and of samples of both parts, the fingerprint of the text, the SHA-256
of what follows), then for all samples their pieces in order, each its first token in its part of the text (uint64), its
length (uint32), and whether its document goes on behind it (uint32); then for each sample the end of its pieces
(uint64), counted from the first of its part.

The parts are what is trained on and what is held out: no sample has documents of both. So an index is of one
data.held_out_fraction. Nothing is read through when it is opened; a sample is checked when it is read.
"""

from __future__ import annotations

import glob
import hashlib
import shlex
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tpengine.config.settings import DEFAULT_SHARE_HELD_OUT
from tpengine.data.source_files import SourceTokens
from tpengine.data.stored_tokens import OpenFile, StoredTokens
from tpengine.data.token_file import FIT_MAGIC, TokenFile

MAGIC, VERSION = FIT_MAGIC, 1
HEADER = struct.Struct("<8sIIQQQQQQ32s32s")
PIECE = np.dtype([("start", "<u8"), ("length", "<u4"), ("goes_on", "<u4")])
END = np.dtype("<u8")


class FitPiece(NamedTuple):
    """A document, or a piece of one that is longer than a sample.

    Attributes:
        start: its first token, in its part of the text.
        length: tokens.
        goes_on: whether its document goes on behind it.
    """

    start: int
    length: int
    goes_on: bool


@dataclass(frozen=True, eq=False)
class FittedPart:
    """The samples of one part of a text.

    Attributes:
        path: the index.
        seq_len: S.
        num_tokens: of the part; each is in one sample.
        pieces, ends: as the file has them.
    """

    path: Path
    seq_len: int
    num_tokens: int
    pieces: StoredTokens
    ends: StoredTokens

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.ends)

    @property
    def padding(self) -> float:
        """Share of the samples' tokens that is padding."""
        return 1 - self.num_tokens / max(1, self.num_samples * self.seq_len)

    def sample(self, number: int) -> list[FitPiece]:
        """Return the pieces of a sample, in order; padding follows.

        Raises: ValueError: the index is damaged, or cannot be read.
        Cost: two reads.
        """
        found = self.ends[max(0, number - 1) : number + 1].tolist()
        first, end = (found[0], found[1]) if number else (0, found[0])
        if not first < end <= min(len(self.pieces), first + self.seq_len):
            raise self._damaged(number)
        pieces = [FitPiece(start, length, bool(on)) for start, length, on in self.pieces[first:end].tolist()]
        if sum(piece.length for piece in pieces) > self.seq_len:
            raise self._damaged(number)
        for piece in pieces:
            if piece.length < 1 or piece.start + piece.length + piece.goes_on > self.num_tokens:
                raise self._damaged(number)
        return pieces

    def _damaged(self, number: int) -> ValueError:
        return ValueError(
            f"a fit index has documents of its text: {self.path} is damaged at sample {number}: write it again with "
            f"tpengine data --fit {self.seq_len} PATH"
        )


@dataclass(frozen=True, eq=False)
class FitIndex:
    """An index, opened.

    Attributes:
        path: of the index.
        source: its text, as the user named it.
        seq_len: S.
        train, held_out: the samples of each part.
        sha256: of its content, in hex, as its header has it.
        content: all bytes behind the header.
    """

    path: Path
    source: str
    seq_len: int
    train: FittedPart
    held_out: FittedPart
    sha256: str
    content: StoredTokens

    @property
    def file(self) -> TokenFile:
        """The index as what is checked while training goes on: bytes, and the SHA-256 that they must have."""
        return TokenFile(self.content, 256, self.sha256)


class MadeOf(NamedTuple):
    """What the header of an index says that it was made of.

    Attributes:
        num_tokens: of the text.
        num_train: of its training part.
        identity: of the text, see identity_of.
    """

    num_tokens: int
    num_train: int
    identity: bytes


def made_of(path: Path) -> MadeOf | None:
    """Return what an index was made of; None if there is none, or none that can be read."""
    try:
        header = OpenFile(path).read(0, HEADER.size)
    except OSError:
        return None
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        return None
    _, _, _, num_tokens, num_train, *_, identity, _ = HEADER.unpack(header)
    return MadeOf(num_tokens, num_train, identity)


def index_path(text: TokenFile, seq_len: int) -> Path:
    """Return where the index of a text is: beside its first file."""
    first = first_file(text)
    return first.with_name(f"{first.name}.{seq_len}.fit")


def first_file(text: TokenFile) -> Path:
    """Return the first file of a text that is in files."""
    tokens = text.tokens
    assert isinstance(tokens, StoredTokens | SourceTokens), "a text with documents is in files"
    return tokens.files[0].path if isinstance(tokens, SourceTokens) else tokens.file.path


def fit_command(source: str, seq_len: int) -> str:
    """Return the command that writes the index of a text, named as the user named it."""
    return f"tpengine data --fit {seq_len} {shlex.quote(source)}"


def identity_of(text: TokenFile) -> bytes:
    """Return what identifies a text and its documents, without reading it; a SHA-256."""
    starts = "" if text.about is None else text.about.starts_sha256
    return hashlib.sha256(f"{len(text.tokens)} {text.sha256} {starts}".encode()).digest()


def indices_of(text: TokenFile) -> list[tuple[Path, int]]:
    """Return the indices beside a text, and the S that each has in its name, the smallest first."""
    first = first_file(text)
    found = []
    for path in first.parent.glob(f"{glob.escape(first.name)}.*.fit"):
        length = path.name[len(first.name) + 1 : -len(".fit")]
        if length.isdecimal():
            found.append((path, int(length)))
    return sorted(found, key=lambda of: of[1])


def open_index(
    text: TokenFile,
    source: str,
    seq_len: int,
    num_train: int | None = None,
    held_out_fraction: float = DEFAULT_SHARE_HELD_OUT,
) -> FitIndex:
    """Open the index of a text.

    Args:
        text: that knows its documents.
        source: as the user named it: a file, a directory, a glob or a list; for messages.
        seq_len: S.
        num_train: its tokens that are trained on, and held_out_fraction: from which that follows; None for those of the
            index.

    Raises: ValueError: none is there, or it is of another S, other data or another held-out part; one line.
    """
    path, remedy = index_path(text, seq_len), f"write it with {fit_command(source, seq_len)}"
    if num_train is not None and held_out_fraction != DEFAULT_SHARE_HELD_OUT:
        remedy += f" --held-out-fraction {held_out_fraction:g}"
    try:
        file = OpenFile(path)
        header = file.read(0, HEADER.size)
        size = file.identity().size
    except FileNotFoundError:
        others = ", ".join(other.name for other, _ in indices_of(text))
        raise ValueError(
            f"--data.packing fit needs an index of train.seq_len {seq_len}: {path} is not there, there is "
            f"{others or 'none'}: {remedy}, or use --data.packing documents"
        ) from None
    except OSError as error:
        raise ValueError(f"a fit index must be readable: {path}: {error.strerror}: {remedy}") from None
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise ValueError(f"a fit index starts with {MAGIC!r} and has a whole header: {path} does not: {remedy}")
    _, version, of_length, num_tokens, of_train, *numbers, identity, content = HEADER.unpack(header)
    train_pieces, train_samples, held_pieces, held_samples = numbers
    expected = (
        HEADER.size + (train_pieces + held_pieces) * PIECE.itemsize + (train_samples + held_samples) * END.itemsize
    )
    if version != VERSION or size != expected:
        raise ValueError(
            f"a fit index of version {VERSION} has {expected} bytes by its header: {path} has version {version} and "
            f"{size} bytes: {remedy}"
        )
    if of_length != seq_len:
        raise ValueError(
            f"a fit index must be of train.seq_len: {path} is of {of_length}, train.seq_len is {seq_len}: {remedy}"
        )
    if identity != identity_of(text) or num_tokens != len(text.tokens):
        others = ", others or in other documents" if num_tokens == len(text.tokens) else ""
        raise ValueError(
            f"a fit index must be of the data: {path} was made of {num_tokens:,} tokens, and {source} has "
            f"{len(text.tokens):,}{others}: {remedy}"
        )
    if num_train is not None and of_train != num_train:
        raise ValueError(
            f"a fit index must be of the same held-out part: {path} was made with {num_tokens - of_train:,} tokens of "
            f"{num_tokens:,} held out, this run holds out {num_tokens - num_train:,}: {remedy}"
        )
    ends_at = HEADER.size + (train_pieces + held_pieces) * PIECE.itemsize

    def part(of_part: int, pieces: slice, samples: slice) -> FittedPart:
        return FittedPart(
            path,
            seq_len,
            of_part,
            StoredTokens(file, PIECE, HEADER.size + pieces.start * PIECE.itemsize, pieces.stop - pieces.start),
            StoredTokens(file, END, ends_at + samples.start * END.itemsize, samples.stop - samples.start),
        )

    everything = StoredTokens(file, np.dtype("<u1"), HEADER.size, size - HEADER.size)
    train = part(of_train, slice(0, train_pieces), slice(0, train_samples))
    behind = slice(train_pieces, train_pieces + held_pieces), slice(train_samples, train_samples + held_samples)
    return FitIndex(path, source, seq_len, train, part(num_tokens - of_train, *behind), content.hex(), everything)
