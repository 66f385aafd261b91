"""Token files of our own: validated when opened; written beside their place, then renamed.

Version 1 is a 64-byte little-endian header (magic, version, dtype code, vocabulary, count, SHA-256 of the tokens), then
the tokens as uint8, uint16 or uint32. A hash of zeros means that the file was written without one. The hash is SHA-256
because any machine can compute it (`tail -c +65 FILE | sha256sum`), and because processors with instructions for it
compute it twice as fast as BLAKE2b.

Version 2 knows its documents. Its header has 512 bytes: those 64, then number and place of the documents' starts, the
id that begins and the one that ends each (-1 for none), the largest id, the SHA-256 of the starts, that of the
tokenizer's file, and the tokenizer's name in UTF-8. Behind the tokens, at a multiple of 8 bytes, is the number of the
first token of each document, as uint64. Behind the tokenizer's name are the names of the columns that the file was
written with, with commas between (columns.py); zeros for none.
"""

from __future__ import annotations

import hashlib
import operator
import os
import reprlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, SupportsIndex, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tpengine.data.columns import check_name
from tpengine.data.source_files import About, SourceTokens, check_pieces
from tpengine.data.stored_tokens import DocumentStarts, DocumentTokens, OpenFile, StoredTokens, Tokens
from tpengine.files import written_beside

MAGIC, VERSION, WITH_DOCUMENTS = b"TPTOKENS", 1, 2
HEADER = struct.Struct("<8sIIQQ32s")
HEADER_BYTES = HEADER.size
# Of indices of fitted samples (fit_index.py), which lie beside token files and are none.
FIT_MAGIC = b"TPFITIDX"
# Of version 2, behind the first; then zeros.
MORE = struct.Struct("<QQqqQ32s32s128s")
ALL_HEADER_BYTES = 512
_NAMES_AT = HEADER_BYTES + MORE.size
_NAMES_BYTES = ALL_HEADER_BYTES - _NAMES_AT
NO_HASH = bytes(32)
START = np.dtype("<u8")
DTYPES: Mapping[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
TextTokens = StoredTokens | SourceTokens | Tokens
_LENGTHS_AT_ONCE = _NUMBERS_AT_ONCE = 1 << 16


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
    tokens.written_with = _columns_in(header, path, remedy)
    tokenizer = name.rstrip(bytes(1)).decode(errors="replace")
    about = About(marks[0], marks[1], tokenizer, of_tokenizer.hex() if tokenizer else "", largest, of_starts.hex())
    return TokenFile(tokens, vocab_size, content.hex(), about)


def _columns_in(header: bytes, path: Path, remedy: str) -> tuple[str, ...]:
    """Return the names of the columns that a file was written with."""
    names = header[_NAMES_AT:].rstrip(bytes(1)).decode(errors="replace")
    try:
        for name in names.split(",") if names else ():
            check_name(name)
    except ValueError as error:
        raise ValueError(f"a token file names the columns that lie beside it: {path}: {error}, and {remedy}") from None
    return tuple(names.split(",")) if names else ()


def names_of_columns(names: Iterable[str]) -> bytes:
    """Return what a header of version 2 says, behind `write_starts`, of the columns that are written with the tokens.

    Raises: ValueError: there is no room for all names.
    """
    content = ",".join(names).encode()
    if len(content) > _NAMES_BYTES:
        raise ValueError(
            f"names of a token file's columns have at most {_NAMES_BYTES} bytes together: got {len(content)}: use "
            "shorter ones, or add some with write_column"
        )
    return content


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


@runtime_checkable
class SupportsArray(Protocol):
    """What numpy makes an array of."""

    def __array__(self) -> NDArray[Any]: ...


# What tokens come as: an array, or what numpy makes one of, such as a tensor on the host; or numbers one by one.
TokensToWrite = NDArray[Any] | SupportsArray | Iterable[int] | Iterable["NDArray[Any] | SupportsArray | Sequence[int]"]


def write_tokens(
    path: str | Path,
    tokens: TokensToWrite,
    vocab_size: int,
    *,
    replaces: bool = True,
    lengths: Callable[[], Iterable[int]] | None = None,
    about: About | None = None,
) -> int:
    """Write a token file, atomically: readers see the old file or the whole new one.

    Args:
        path: the file; its directory exists.
        tokens: integers in [0, vocab_size): an array, a tensor on the host, or a list of numbers; or pieces of these in
            order, of which one is held at a time.
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
        check_place(path, replaces)
        return _write_beside(path, tokens, vocab_size, lengths, about or About())
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"a token file must be writable: {path}: {reason}: correct that or choose another file"
        ) from None


def check_place(path: Path, replaces: bool) -> None:
    """Raise ValueError if no token file can be there; also for a device, because the rename would replace it."""
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
            start = file.read(len(MAGIC))
        if start not in (MAGIC, b""):
            raise ValueError(
                f"a token file must not replace a file of another kind: {path} starts with {start!r}: choose another "
                f"file, such as {beside(path)}, or remove it first"
            )


def _write_beside(
    path: Path,
    tokens: TokensToWrite,
    vocab_size: int,
    lengths: Callable[[], Iterable[int]] | None,
    about: About,
) -> int:
    """Write a temporary file and rename it. An OSError is the target's."""
    dtype = dtype_for(vocab_size)
    header_bytes = HEADER_BYTES if lengths is None else ALL_HEADER_BYTES
    with written_beside(path) as temporary, temporary.open("wb") as file:
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
        more = b"" if lengths is None else write_starts(file, path, lengths(), count, about._replace(largest=largest))
        version = VERSION if lengths is None else WITH_DOCUMENTS
        file.seek(0)
        file.write(HEADER.pack(MAGIC, version, dtype.itemsize, vocab_size, count, content.digest()) + more)
        file.flush()
        os.fsync(file.fileno())
    return count


def write_starts(file: BinaryIO, path: Path, lengths: Iterable[int], count: int, about: About) -> bytes:
    """Write where documents begin behind the tokens; return what the header says of it."""
    file.write(bytes(-file.tell() % START.itemsize))
    offset, content, num_documents, place = file.tell(), hashlib.sha256(), 0, 0
    for some in _some(lengths):
        sizes = np.array(some, dtype=np.int64)
        if (sizes < 1).any():
            raise ValueError(f"a document of a token file has at least 1 token: got one of {sizes.min()} for {path}")
        ends = place + np.cumsum(sizes)
        starts = (ends - sizes).astype(START).tobytes()
        content.update(starts)
        file.write(starts)
        num_documents, place = num_documents + len(sizes), int(ends[-1])
    if place != count:
        raise ValueError(f"documents must be all tokens of {path}: they have {place} of {count}: give every length")
    name = about.tokenizer.encode()[:128].decode(errors="ignore").encode()
    return MORE.pack(
        num_documents,
        offset,
        -1 if about.begin is None else about.begin,
        -1 if about.end is None else about.end,
        about.largest,
        content.digest(),
        bytes.fromhex(about.tokenizer_sha256) or NO_HASH,
        name,
    )


def _some(lengths: Iterable[int]) -> Iterator[list[int]]:
    """Yield numbers, many at once."""
    left = iter(lengths)
    while some := list(islice(left, _LENGTHS_AT_ONCE)):
        yield some


def _pieces(tokens: TokensToWrite) -> Iterator[NDArray[Any]]:
    """Yield arrays; turn an OSError of their source into a ValueError, so that it is not taken for the target's."""
    try:
        if isinstance(tokens, SupportsArray):
            yield _on_host(tokens)
            return
        left = iter(tokens)
        for first in left:
            if isinstance(first, SupportsArray) and np.ndim(first):
                yield _on_host(first)
            elif isinstance(first, Sequence) and not isinstance(first, str | bytes):
                yield _array_of(first)
            else:
                yield _array_of([first, *islice(left, _NUMBERS_AT_ONCE)])
    except OSError as error:
        name, reason = error.filename or "its source", error.strerror or error
        raise ValueError(f"the text must be readable: {name}: {reason}: correct that or leave it out") from None


def _on_host(tokens: SupportsArray) -> NDArray[Any]:
    try:
        return np.asarray(tokens)
    except (TypeError, RuntimeError) as error:
        # A tensor of a GPU, or of a dtype that numpy lacks.
        raise ValueError(
            f"tokens must be integers in the host's memory: got {type(tokens).__name__}: {error}: use tokens.cpu()"
        ) from None


def _array_of(numbers: Sequence[Any]) -> NDArray[Any]:
    """Return whole numbers as an array.

    Raises: ValueError: something else, such as 1.5, True, text, None or a list; or a number of more than 63 bits.
    """
    for place, number in enumerate(numbers):
        if type(number) is int and 0 <= number < 2**63:
            continue
        if isinstance(number, bool | np.bool_) or not isinstance(number, SupportsIndex):
            raise ValueError(
                f"tokens must be integers: got {reprlib.repr(number)} at place {place} of a list: use ids, as a "
                "tokenizer gives them"
            )
        if not -(2**63) <= operator.index(number) < 2**63:
            bits = operator.index(number).bit_length()
            raise ValueError(
                f"tokens must be at least 0 and below vocab_size: got a number of {bits} bits at place {place} of a "
                "list: use ids, as a tokenizer gives them"
            )
    return np.array([operator.index(number) for number in numbers], dtype=np.int64)
