"""Token files, validated when opened; writing.py writes them.

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

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tpengine.data.files.documents import DocumentStarts, DocumentTokens
from tpengine.data.files.one_file import About, check_pieces
from tpengine.data.files.source_tokens import SourceTokens
from tpengine.data.files.stored_tokens import OpenFile, StoredTokens, Tokens

MAGIC, VERSION, WITH_DOCUMENTS = b"TPTOKENS", 1, 2
HEADER = struct.Struct("<8sIIQQ32s")
HEADER_BYTES = HEADER.size
# Of indices of fitted samples (fit/index.py), which lie beside token files and are none.
FIT_MAGIC = b"TPFITIDX"
# Of version 2, behind the first; then zeros.
MORE = struct.Struct("<QQqqQ32s32s128s")
ALL_HEADER_BYTES = 512
NO_HASH = bytes(32)
START = np.dtype("<u8")
DTYPES: Mapping[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


TextTokens = StoredTokens | SourceTokens | Tokens


class TokenFile(NamedTuple):
    """Tokens, the number of values they can take, and the SHA-256 that the file gives for them; empty if it gives none.

    Tokens of a file are read when they are sliced: `tokens[:]` reads all.

    A source of several files, or of others' (source.py), is one too: its vocabulary is 0 if no file says one, its hash
    is of what identifies the files, and `parts` are those whose content has a hash.
    """

    tokens: TextTokens
    vocab_size: int
    sha256: str = ""
    about: About | None = None
    parts: tuple[TokenFile, ...] = ()


def open_tokens(path: str | Path) -> TokenFile:
    """Open a token file after checking its header and size; its content is read when it is sliced.

    Raises: ValueError: no such file, or not a whole token file; one line with path, values and remedy.
    """
    path = Path(path)
    remedy = f"write one from text with: tpengine data --from DIR --out {beside(path)}"
    try:
        file = OpenFile(path)
        header = file.read(0, ALL_HEADER_BYTES)
        size = file.identity().size
    except OSError as error:
        raise ValueError(f"a token file must be readable: {path}: {error.strerror}: {remedy}") from None
    if len(header) < HEADER_BYTES:
        raise ValueError(f"a token file has at least {HEADER_BYTES} bytes: {path} has {len(header)}: {remedy}")
    magic, version, code, vocab_size, count, content = HEADER.unpack(header[:HEADER_BYTES])
    if magic != MAGIC:
        raise ValueError(f"a token file starts with {MAGIC!r}: {path} starts with {magic!r}: {remedy}")
    if version not in (VERSION, WITH_DOCUMENTS):
        raise ValueError(f"token file version must be {VERSION} or {WITH_DOCUMENTS}: {path} has {version}: {remedy}")
    if code not in DTYPES:
        raise ValueError(f"token dtype code must be 1, 2 or 4 (bytes): {path} has {code}: {remedy}")
    if not 1 <= vocab_size <= 256**code:
        raise ValueError(
            f"the vocabulary must be 1 to {256**code} for {code}-byte tokens: {path} has {vocab_size}: {remedy}"
        )
    if not count:
        raise ValueError(f"a token file must hold at least 1 token: {path} has 0: {remedy}")
    if version == WITH_DOCUMENTS:
        return _with_documents(path, file, header, size, remedy)
    expected = HEADER_BYTES + count * code
    if size != expected:
        raise ValueError(
            f"a token file of {count} {code}-byte tokens has {expected} bytes: {path} has {size}, "
            f"{'cut short' if size < expected else 'too long'}: {remedy}"
        )
    tokens = StoredTokens(file, DTYPES[code], HEADER_BYTES, count)
    return TokenFile(tokens, vocab_size, "" if content == NO_HASH else content.hex())


def _with_documents(path: Path, file: OpenFile, header: bytes, size: int, remedy: str) -> TokenFile:
    """Open a file of version 2, of which the first part of the header is right."""
    if len(header) < ALL_HEADER_BYTES:
        raise ValueError(
            f"a token file of version {WITH_DOCUMENTS} has at least {ALL_HEADER_BYTES} bytes: {path} has {size}: "
            f"{remedy}"
        )
    _, _, code, vocab_size, count, content = HEADER.unpack(header[:HEADER_BYTES])
    num_documents, offset, begin, end, largest, of_starts, of_tokenizer, name = MORE.unpack_from(header, HEADER_BYTES)
    behind = ALL_HEADER_BYTES + count * code
    expected = behind + -behind % START.itemsize + num_documents * START.itemsize
    if size != expected or offset != expected - num_documents * START.itemsize:
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
    check_pieces(starts)
    if largest >= vocab_size or any(mark is not None and not 0 <= mark < vocab_size for mark in marks):
        raise ValueError(
            f"ids of a token file must be below its vocabulary, {vocab_size}: {path} has {largest}, begins documents "
            f"with {marks[0]} and ends them with {marks[1]}: {remedy}"
        )
    tokens = DocumentTokens(file, DTYPES[code], ALL_HEADER_BYTES, count, starts)
    tokenizer = name.rstrip(bytes(1)).decode(errors="replace")
    about = About(marks[0], marks[1], tokenizer, of_tokenizer.hex() if tokenizer else "", largest, of_starts.hex())
    return TokenFile(tokens, vocab_size, content.hex(), about)


def beside(path: Path) -> Path:
    """Return a name for a token file beside a path, which may be the user's text and must not be replaced."""
    return path.with_name(path.name + ".tokens")


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """Return the smallest dtype that holds vocab_size - 1."""
    return next(dtype for size, dtype in DTYPES.items() if vocab_size <= 256**size)


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
