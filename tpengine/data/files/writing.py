"""Write token files: beside their place, then renamed. What is in one is said in token_file.py."""

from __future__ import annotations

import hashlib
import operator
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol, SupportsIndex, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tpengine.data.files.one_file import About
from tpengine.data.files.token_file import (
    ALL_HEADER_BYTES,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MORE,
    NO_HASH,
    START,
    VERSION,
    WITH_DOCUMENTS,
    beside,
    check_tokens,
    dtype_for,
)
from tpengine.files import written_beside

_LENGTHS_AT_ONCE = _NUMBERS_AT_ONCE = 1 << 16


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
