"""Token files: written atomically, validated when opened.

A token file is a 64-byte little-endian header (magic, version, dtype code, vocabulary, count, SHA-256 of all that
follows), then the tokens as uint8, uint16 or uint32. A hash of zeros means that the file was written without one. The
hash is SHA-256 because any machine can compute it (`tail -c +65 FILE | sha256sum`), and because processors with
instructions for it compute it twice as fast as BLAKE2b.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tpengine.data.stored_tokens import OpenFile, StoredTokens, Tokens
from tpengine.files import written_beside

_MAGIC, _VERSION = b"TPTOKENS", 1
_HEADER = struct.Struct("<8sIIQQ32s")
_HEADER_BYTES = _HEADER.size
_NO_HASH = bytes(32)
_DTYPES: Mapping[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


class TokenFile(NamedTuple):
    """Tokens, the number of values they can take, and the SHA-256 that the file gives for them; empty if it gives none.

    Tokens of a file are read when they are sliced: `tokens[:]` reads all.
    """

    tokens: StoredTokens | Tokens
    vocab_size: int
    sha256: str = ""


def write_tokens(
    path: str | Path, tokens: NDArray[Any] | Iterable[NDArray[Any]], vocab_size: int, *, replaces: bool = True
) -> int:
    """Write a token file, atomically: readers see the old file or the whole new one.

    Args:
        path: the file; its directory exists.
        tokens: integers in [0, vocab_size): one array, or its pieces in order, of which one is held at a time.
        vocab_size: decides the dtype: the smallest that holds vocab_size - 1.
        replaces: whether a token file that is there may be replaced.
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
        return _write_beside(path, tokens, vocab_size)
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


def _write_beside(path: Path, tokens: NDArray[Any] | Iterable[NDArray[Any]], vocab_size: int) -> int:
    """Write a temporary file and rename it. An OSError is the target's."""
    dtype = next(d for code, d in _DTYPES.items() if vocab_size <= 256**code)
    with written_beside(path) as beside, beside.open("wb") as file:
        file.write(bytes(_HEADER_BYTES))
        count, content = 0, hashlib.sha256()
        for piece in _pieces(tokens):
            check_tokens(piece, vocab_size, "vocab_size")
            narrow = np.ascontiguousarray(piece, dtype=dtype).reshape(-1).data
            content.update(narrow)
            file.write(narrow)
            count += piece.size
        if not count:
            raise ValueError(f"a token file must hold at least 1 token: got none for {path}: check the source")
        file.seek(0)
        file.write(_HEADER.pack(_MAGIC, _VERSION, dtype.itemsize, vocab_size, count, content.digest()))
        file.flush()
        os.fsync(file.fileno())
    return count


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
        header = file.read(0, _HEADER_BYTES)
        size = file.identity().size
    except OSError as error:
        raise ValueError(f"a token file must be readable: {path}: {error.strerror}: {remedy}") from None
    if len(header) < _HEADER_BYTES:
        raise ValueError(f"a token file has at least {_HEADER_BYTES} bytes: {path} has {len(header)}: {remedy}")
    magic, version, code, vocab_size, count, content = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise ValueError(f"a token file starts with {_MAGIC!r}: {path} starts with {magic!r}: {remedy}")
    if version != _VERSION:
        raise ValueError(f"token file version must be {_VERSION}: {path} has {version}: {remedy}")
    if code not in _DTYPES:
        raise ValueError(f"token dtype code must be 1, 2 or 4 (bytes): {path} has {code}: {remedy}")
    if not 1 <= vocab_size <= 256**code:
        raise ValueError(
            f"the vocabulary must be 1 to {256**code} for {code}-byte tokens: {path} has {vocab_size}: {remedy}"
        )
    if not count:
        raise ValueError(f"a token file must hold at least 1 token: {path} has 0: {remedy}")
    expected = _HEADER_BYTES + count * code
    if size != expected:
        raise ValueError(
            f"a token file of {count} {code}-byte tokens has {expected} bytes: {path} has {size}, "
            f"{'cut short' if size < expected else 'too long'}: {remedy}"
        )
    tokens = StoredTokens(file, _DTYPES[code], _HEADER_BYTES, count)
    return TokenFile(tokens, vocab_size, "" if content == _NO_HASH else content.hex())


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
