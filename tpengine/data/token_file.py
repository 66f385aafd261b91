"""Token files: written atomically, validated when opened.

Version 1 is a 64-byte little-endian header (magic, version, dtype code, vocabulary, count, SHA-256 of the tokens), then
the tokens as uint8, uint16 or uint32. A hash of zeros means that the file was written without one. The hash is SHA-256
because any machine can compute it (`tail -c +65 FILE | sha256sum`), and because processors with instructions for it
compute it twice as fast as BLAKE2b.

Version 2 knows its documents. Its header has 512 bytes: those 64, then number and place of the documents' starts, the
id that begins and the one that ends each (-1 for none), the largest id, the SHA-256 of the starts, that of the
tokenizer's file, and the tokenizer's name in UTF-8. Behind the tokens, at a multiple of 8 bytes, is the number of the
first token of each document, as uint64.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tpengine.data.documents import DocumentStarts, DocumentTokens
from tpengine.data.stored_tokens import OpenFile, StoredTokens, Tokens
from tpengine.files import written_beside

_MAGIC, _VERSION, _WITH_DOCUMENTS = b"TPTOKENS", 1, 2
_HEADER = struct.Struct("<8sIIQQ32s")
_HEADER_BYTES = _HEADER.size
# Of version 2, behind the first; then zeros.
_MORE = struct.Struct("<QQqqQ32s32s128s")
_ALL_HEADER_BYTES = 512
_NO_HASH = bytes(32)
_START = np.dtype("<u8")
_LENGTHS_AT_ONCE = 1 << 16
_DTYPES: Mapping[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


class TokenFile(NamedTuple):
    """Tokens, the number of values they can take, and the SHA-256 that the file gives for them; empty if it gives none.

    Tokens of a file are read when they are sliced: `tokens[:]` reads all.
    """

    tokens: StoredTokens | Tokens
    vocab_size: int
    sha256: str = ""
    about: About | None = None


class About(NamedTuple):
    """What a token file of version 2 says besides.

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


def write_tokens(
    path: str | Path,
    tokens: NDArray[Any] | Iterable[NDArray[Any]],
    vocab_size: int,
    *,
    replaces: bool = True,
    lengths: Callable[[], Iterable[int]] | None = None,
    about: About | None = None,
) -> int:
    """Write a token file, atomically: readers see the old file or the whole new one.

    Args:
        path: the file; its directory exists.
        tokens: integers in [0, vocab_size): one array, or its pieces in order, of which one is held at a time.
        vocab_size: decides the dtype: the smallest that holds vocab_size - 1.
        replaces: whether a token file that is there may be replaced.
        lengths: called behind the last token: tokens of each document, which add up to all. With it the file is of
            version 2.
        about: what such a file says of marks and tokenizer.
    Returns: number of tokens written.
    Raises: ValueError: a file that may not be replaced, a token outside the vocabulary, no tokens, a vocabulary beyond
        uint32, no such directory, a path that is not a regular file or cannot be written, pieces that cannot be read;
        one line.
    """
    path = Path(path)
    if not 1 <= vocab_size <= 2**32:
        raise ValueError(f"vocab_size must be at least 1 and at most 2**32: got {vocab_size}: use 256 for bytes")
    try:
        _check_place(path, replaces)
        return _write_beside(path, tokens, vocab_size, lengths, about or About())
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"a token file must be writable: {path}: {reason}: correct that or choose another file"
        ) from None


def _check_place(path: Path, replaces: bool) -> None:
    """Raise before anything is read; also for a device, because the rename would replace it."""
    if not path.parent.is_dir():
        raise ValueError(f"the token file's directory must exist: {path.parent}: create it first")
    if path.is_dir():
        inside = path / "text.tokens"
        raise ValueError(
            f"a token file must be a regular file: {path}: is a directory: choose a file, such as {inside}"
        )
    if path.exists() and not path.is_file():
        raise ValueError(f"a token file must be a regular file: {path}: is a device or pipe: choose another file")
    if path.exists() and not replaces:
        raise ValueError(f"a token file must be new: {path} is there: remove it first, or choose another file")
    if path.exists():
        with path.open("rb") as file:
            start = file.read(len(_MAGIC))
        if start not in (_MAGIC, b""):
            raise ValueError(
                f"a token file must not replace a file of another kind: {path} starts with {start!r}: choose another "
                f"file, such as {_beside(path)}, or remove it first"
            )


def _beside(path: Path) -> Path:
    """Return a name for a token file beside a path, which may be the user's text and must not be replaced."""
    return path.with_name(path.name + ".tokens")


def _write_beside(
    path: Path,
    tokens: NDArray[Any] | Iterable[NDArray[Any]],
    vocab_size: int,
    lengths: Callable[[], Iterable[int]] | None,
    about: About,
) -> int:
    """Write a temporary file and rename it. An OSError is the target's."""
    dtype = next(d for code, d in _DTYPES.items() if vocab_size <= 256**code)
    header_bytes = _HEADER_BYTES if lengths is None else _ALL_HEADER_BYTES
    with written_beside(path) as beside, beside.open("wb") as file:
        file.write(bytes(header_bytes))
        count, largest, content = 0, 0, hashlib.sha256()
        for piece in _pieces(tokens):
            check_tokens(piece, vocab_size, "vocab_size")
            narrow = np.ascontiguousarray(piece, dtype=dtype).reshape(-1).data
            content.update(narrow)
            file.write(narrow)
            count += piece.size
            largest = max(largest, int(piece.max(initial=0)))
        if not count:
            raise ValueError(f"a token file must hold at least 1 token: got none for {path}: check the source")
        more = b"" if lengths is None else _write_starts(file, path, lengths(), count, about._replace(largest=largest))
        version = _VERSION if lengths is None else _WITH_DOCUMENTS
        file.seek(0)
        file.write(_HEADER.pack(_MAGIC, version, dtype.itemsize, vocab_size, count, content.digest()) + more)
        file.flush()
        os.fsync(file.fileno())
    return count


def _write_starts(file: BinaryIO, path: Path, lengths: Iterable[int], count: int, about: About) -> bytes:
    """Write where documents begin behind the tokens; return what the header says of it."""
    file.write(bytes(-file.tell() % _START.itemsize))
    offset, content, num_documents, place = file.tell(), hashlib.sha256(), 0, 0
    for some in _some(lengths):
        sizes = np.array(some, dtype=np.int64)
        if (sizes < 1).any():
            raise ValueError(f"a document of a token file has at least 1 token: got one of {sizes.min()} for {path}")
        ends = place + np.cumsum(sizes)
        starts = (ends - sizes).astype(_START).tobytes()
        content.update(starts)
        file.write(starts)
        num_documents, place = num_documents + len(sizes), int(ends[-1])
    if place != count:
        raise ValueError(f"documents must be all tokens of {path}: they have {place} of {count}: give every length")
    name = about.tokenizer.encode()[:128].decode(errors="ignore").encode()
    return _MORE.pack(
        num_documents,
        offset,
        -1 if about.begin is None else about.begin,
        -1 if about.end is None else about.end,
        about.largest,
        content.digest(),
        bytes.fromhex(about.tokenizer_sha256) or _NO_HASH,
        name,
    )


def _some(lengths: Iterable[int]) -> Iterator[list[int]]:
    """Yield numbers, many at once."""
    left = iter(lengths)
    while some := list(islice(left, _LENGTHS_AT_ONCE)):
        yield some


def _pieces(tokens: NDArray[Any] | Iterable[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """Yield the arrays; turn an OSError of their source into a ValueError, so that it is not taken for the target's."""
    try:
        yield from [tokens] if isinstance(tokens, np.ndarray) else tokens
    except OSError as error:
        name, reason = error.filename or "its source", error.strerror or error
        raise ValueError(f"the text must be readable: {name}: {reason}: correct that or leave it out") from None


def open_tokens(path: str | Path) -> TokenFile:
    """Open a token file after checking its header and size; its content is read when it is sliced.

    Raises: ValueError: no such file, or not a whole token file; one line with path, values and remedy.
    """
    path = Path(path)
    remedy = f"write one from text with: tpengine data --from DIR --out {_beside(path)}"
    try:
        file = OpenFile(path)
        header = file.read(0, _ALL_HEADER_BYTES)
        size = file.identity().size
    except OSError as error:
        raise ValueError(f"a token file must be readable: {path}: {error.strerror}: {remedy}") from None
    if len(header) < _HEADER_BYTES:
        raise ValueError(f"a token file has at least {_HEADER_BYTES} bytes: {path} has {len(header)}: {remedy}")
    magic, version, code, vocab_size, count, content = _HEADER.unpack(header[:_HEADER_BYTES])
    if magic != _MAGIC:
        raise ValueError(f"a token file starts with {_MAGIC!r}: {path} starts with {magic!r}: {remedy}")
    if version not in (_VERSION, _WITH_DOCUMENTS):
        raise ValueError(f"token file version must be {_VERSION} or {_WITH_DOCUMENTS}: {path} has {version}: {remedy}")
    if code not in _DTYPES:
        raise ValueError(f"token dtype code must be 1, 2 or 4 (bytes): {path} has {code}: {remedy}")
    if not 1 <= vocab_size <= 256**code:
        raise ValueError(
            f"the vocabulary must be 1 to {256**code} for {code}-byte tokens: {path} has {vocab_size}: {remedy}"
        )
    if not count:
        raise ValueError(f"a token file must hold at least 1 token: {path} has 0: {remedy}")
    if version == _WITH_DOCUMENTS:
        return _with_documents(path, file, header, size, remedy)
    expected = _HEADER_BYTES + count * code
    if size != expected:
        raise ValueError(
            f"a token file of {count} {code}-byte tokens has {expected} bytes: {path} has {size}, "
            f"{'cut short' if size < expected else 'too long'}: {remedy}"
        )
    tokens = StoredTokens(file, _DTYPES[code], _HEADER_BYTES, count)
    return TokenFile(tokens, vocab_size, "" if content == _NO_HASH else content.hex())


def _with_documents(path: Path, file: OpenFile, header: bytes, size: int, remedy: str) -> TokenFile:
    """Open a file of version 2, of which the first part of the header is right."""
    if len(header) < _ALL_HEADER_BYTES:
        raise ValueError(
            f"a token file of version {_WITH_DOCUMENTS} has at least {_ALL_HEADER_BYTES} bytes: {path} has {size}: "
            f"{remedy}"
        )
    _, _, code, vocab_size, count, content = _HEADER.unpack(header[:_HEADER_BYTES])
    num_documents, offset, begin, end, largest, of_starts, of_tokenizer, name = _MORE.unpack_from(header, _HEADER_BYTES)
    behind = _ALL_HEADER_BYTES + count * code
    expected = behind + -behind % _START.itemsize + num_documents * _START.itemsize
    if size != expected or offset != expected - num_documents * _START.itemsize:
        raise ValueError(
            f"a token file of {count} {code}-byte tokens in {num_documents} documents has {expected} bytes, its "
            f"documents' starts last: {path} has {size}, {'cut short' if size < expected else 'damaged'}: {remedy}"
        )
    marks = [None if mark == -1 else mark for mark in (begin, end)]
    starts = DocumentStarts(file, offset, num_documents)
    if not 1 <= num_documents <= count or int(starts[:1][0]) != 0 or not int(starts[-1:][0]) < count:
        raise ValueError(
            f"documents of a token file begin at token 0 and within its {count}: {path} has {num_documents}, from "
            f"{starts[:1].tolist()} to {starts[-1:].tolist()}: {remedy}"
        )
    if largest >= vocab_size or any(mark is not None and not 0 <= mark < vocab_size for mark in marks):
        raise ValueError(
            f"ids of a token file must be below its vocabulary, {vocab_size}: {path} has {largest}, begins documents "
            f"with {marks[0]} and ends them with {marks[1]}: {remedy}"
        )
    tokens = DocumentTokens(file, _DTYPES[code], _ALL_HEADER_BYTES, count, starts)
    tokenizer = name.rstrip(bytes(1)).decode(errors="replace")
    about = About(marks[0], marks[1], tokenizer, of_tokenizer.hex() if tokenizer else "", largest, of_starts.hex())
    return TokenFile(tokens, vocab_size, content.hex(), about)


def check_tokens(tokens: NDArray[Any], vocab_size: int, name: str) -> None:
    """Raise ValueError unless all tokens are integers in [0, vocab_size); `name` is the vocabulary's in messages."""
    if tokens.dtype.kind not in "iu":
        raise ValueError(f"tokens must be integers: got dtype {tokens.dtype}: use uint8, uint16 or uint32")
    for token in (int(tokens.min()), int(tokens.max())) if tokens.size else ():
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"tokens must be at least 0 and below {name}: got {token}, {name} {vocab_size}: "
                f"use {name} {max(token, 0) + 1} or other text"
            )
