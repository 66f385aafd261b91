"""Columns: values beside the tokens of a file, so many for each token; validated when opened, renamed into place.

A column is a file of its own beside the tokens, `NAME.COLUMN.column`: one can be added to tokens that are there, of
whatever format, and nothing of them is written again. It is a little-endian header of 128 bytes (magic, version, dtype,
width, number of tokens, the fingerprint of the token file, the SHA-256 of what follows), then each token's values.

Values are stored with the token that they are of. A model predicts that token one place before, so a reader hands a
column out as it does labels: `columns[t]` is of `labels[t]`, and zero where the label is ignored (samples.py).

The decision a reader will question: a column that is lost when a token file is copied alone would change training
without a word. So a token file that was written with columns names them in its header (token_file.py), and a run that
does not find its weights ends before its first step.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tpengine.data.source_files import SourceFile
from tpengine.data.stored_tokens import OpenFile, StoredTokens
from tpengine.files import written_beside
from tpengine.spelling import did_you_mean
from tpengine.training.samples import WEIGHTS

MAGIC, VERSION = b"TPCOLUMN", 1
HEADER = struct.Struct("<8sI8sIQ32s32s")
HEADER_BYTES = 128
_DTYPES = ("uint8", "uint16", "uint32", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_TAKEN = ("tokens", "labels", "documents")
# Of data.columns.
_NO_WEIGHTS = "no-weights"
_MOST_WIDTH = 4096
_SHOWN_DIGITS = 32


class Column(NamedTuple):
    """What a column is.

    Attributes:
        name: small letters, digits and _; `weights` multiplies each token's loss.
        dtype: of its values: uint8, uint16, uint32, int8, int16, int32, int64, float16, float32 or float64.
        width: values of a token; of 1 an array has no dim for them.
    """

    name: str
    dtype: str = "float32"
    width: int = 1

    def check(self) -> None:
        """Raise ValueError unless this is a column that a file can have."""
        check_name(self.name)
        if self.dtype not in _DTYPES:
            raise ValueError(
                f"the dtype of a column must be one that is known: {self.name} has {self.dtype!r}: "
                f"{did_you_mean(self.dtype, _DTYPES)}"
            )
        if not 1 <= self.width <= _MOST_WIDTH:
            raise ValueError(
                f"a column has 1 to {_MOST_WIDTH} values of each token: {self.name} has width {self.width}: use 1"
            )
        if self.name == WEIGHTS and (self.width != 1 or self.dtype.startswith("int")):
            raise ValueError(
                f"weights are one number of each token, at least 0: got {self.dtype} of width {self.width}: use "
                "float32 of width 1, or another name"
            )

    @property
    def stored(self) -> np.dtype[Any]:
        """The dtype of all values of a token, as a file has them."""
        number = np.dtype(self.dtype).newbyteorder("<")
        return number if self.width == 1 else np.dtype((number, (self.width,)))

    def zeros(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return zeros instead of the values of so many tokens: [*shape], or [*shape, width] of a wider one."""
        return np.zeros(shape if self.width == 1 else (*shape, self.width), dtype=self.dtype)


def check_name(name: str) -> None:
    """Raise ValueError unless this is a name of a column."""
    if not _NAME.fullmatch(name) or name in _TAKEN:
        raise ValueError(
            f"a column's name has 1 to 32 small letters, digits and _, a letter first, and is none of "
            f"{', '.join(_TAKEN)}: got {name!r}: use one such as weights or ref_logprobs"
        )


def column_path(tokens: Path, name: str) -> Path:
    """Return where a column of a token file is: beside it."""
    return tokens.with_name(f"{tokens.name}.{name}.column")


def columns_beside(tokens: Path) -> tuple[str, ...]:
    """Return the names of the columns that lie beside a token file, in order."""
    found = tokens.parent.glob(f"{glob.escape(tokens.name)}.*.column")
    names = (path.name[len(tokens.name) + 1 : -len(".column")] for path in found)
    return tuple(sorted(name for name in names if "." not in name))


class ColumnFile:
    """A column that is being written, piece by piece, under another name than its own.

    Args:
        path: to write to.
        column: what it is.
        tokens: the token file that it will lie beside, for messages.

    Attributes:
        count: tokens whose values are written.
    """

    def __init__(self, path: Path, column: Column, tokens: Path) -> None:
        self.column, self._tokens = column, tokens
        self.count, self._content = 0, hashlib.sha256()
        self._file = path.open("wb")
        self._file.write(bytes(HEADER_BYTES))

    def __enter__(self) -> ColumnFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._file.close()

    def add(self, stored: NDArray[Any]) -> None:
        """Write the values of the next tokens, as values_of returns them."""
        content = np.ascontiguousarray(stored).tobytes()
        self._content.update(content)
        self._file.write(content)
        self.count += len(stored)

    def finish(self, num_tokens: int, fingerprint: str) -> None:
        """Write the header, and have everything on disk.

        Args:
            num_tokens: of the token file.
            fingerprint: of the token file (SourceFile.fingerprint).

        Raises: ValueError: the column has values of more tokens, or of fewer.
        """
        name, dtype, width = self.column
        if self.count != num_tokens:
            raise ValueError(
                f"a column has values of every token: {name} has them of {self.count:,}, {self._tokens} has "
                f"{num_tokens:,} tokens: give each token its values, 0 where it has none"
            )
        self._file.seek(0)
        digests = bytes.fromhex(fingerprint), self._content.digest()
        self._file.write(HEADER.pack(MAGIC, VERSION, dtype.encode(), width, num_tokens, *digests))
        self._file.flush()
        os.fsync(self._file.fileno())


def values_of(column: Column, values: ArrayLike, first: int = 0) -> NDArray[Any]:
    """Return values [n] or [n, width] in a column's dtype.

    Args: first: number of the first token, for messages.
    Raises: ValueError: another shape, or values that the dtype does not hold.
    """
    array = np.asarray(values)
    inner = () if column.width == 1 else (column.width,)
    if column.width == 1 and array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 + len(inner) or array.shape[1:] != inner:
        shape = "[tokens]" if column.width == 1 else f"[tokens, {column.width}]"
        raise ValueError(
            f"values of a column of width {column.width} are {shape}: {column.name} was given {list(array.shape)}: "
            "give one row for each token, or declare another width"
        )
    dtype = np.dtype(column.dtype)
    if array.dtype.kind not in ("biuf" if dtype.kind == "f" else "biu"):
        raise ValueError(
            f"values of a column of {column.dtype} must be {'numbers' if dtype.kind == 'f' else 'whole numbers'}: "
            f"{column.name} was given {array.dtype}: convert them, or declare another dtype"
        )
    with np.errstate(over="ignore"):
        stored = array.astype(dtype)
    wrong = ~np.isfinite(stored) if dtype.kind == "f" else np.zeros(stored.shape, dtype=bool)
    if array.dtype.kind in "biu":  # a token's id must not be rounded to a float
        wrong |= np.where(wrong, 0, stored).astype(np.int64) != array
    if column.name == WEIGHTS:
        wrong |= stored < 0
    if wrong.any():
        at = tuple(int(place[0]) for place in np.nonzero(wrong))
        rule = "finite and at least 0" if column.name == WEIGHTS else f"numbers that {column.dtype} holds"
        raise ValueError(
            f"values of column {column.name} must be {rule}: token {first + at[0]} has {array[at]}: correct it"
            f"{', or declare a wider dtype' if column.name != WEIGHTS else ''}"
        )
    return stored.astype(column.stored.base, copy=False)


def write_column(file: SourceFile, column: Column, values: ArrayLike | Iterable[ArrayLike]) -> int:
    """Add a column to a token file that is there, atomically; one of that name is replaced.

    Args:
        file: the token file, in any format that is read: `open_file(path)`.
        column: name, dtype and width.
        values: of all tokens in order, [n] or [n, width]; or pieces of these, of which one is held at a time.

    Returns: the number of tokens.
    Raises: ValueError: no such column can be; values of another number of tokens, another shape, or that the dtype does
        not hold; a file that cannot be written. One line.
    """
    column.check()
    place = column_path(file.path, column.name)
    is_whole = isinstance(values, Sequence) or hasattr(values, "__array__")
    pieces: Iterable[Any] = [values] if is_whole else cast(Any, values)
    try:
        with written_beside(place) as beside, ColumnFile(beside, column, file.path) as writer:
            for piece in pieces:
                writer.add(values_of(column, piece, writer.count))
            writer.finish(len(file.tokens), file.fingerprint)
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"a column is written beside its tokens: {place}: {reason}: correct that") from None
    return len(file.tokens)


def open_column(file: SourceFile, name: str) -> tuple[Column, StoredTokens, str]:
    """Open a column of a token file after checking its header and size; its content is read when it is sliced.

    Returns: what it is; its values, of which a slice is [n] or [n, width]; the SHA-256 of its content, in hex.
    Raises: ValueError: it is not there, is damaged, or is of other tokens; one line.
    """
    path = column_path(file.path, name)
    remedy = f"write it again with write_column, or remove {path.name}"
    try:
        opened = OpenFile(path)
        header, size = opened.read(0, HEADER_BYTES), opened.identity().size
    except FileNotFoundError:
        others = ", ".join(columns_beside(file.path)) or "no column"
        raise ValueError(
            f"a text must have the columns that a run reads: {file.path} has no {name}, {path} is not there, there is "
            f"{others}: copy it too, or write it with write_column"
        ) from None
    except OSError as error:
        raise ValueError(f"a column must be readable: {path}: {error.strerror}: {remedy}") from None
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
        raise ValueError(f"a column starts with {MAGIC!r} and has a whole header: {path} does not: {remedy}")
    _, version, dtype, width, count, fingerprint, content = HEADER.unpack_from(header)
    if version != VERSION:
        raise ValueError(f"the version of a column must be {VERSION}: {path} has {version}: {remedy}")
    column = Column(name, dtype.rstrip(bytes(1)).decode(errors="replace"), width)
    try:
        column.check()
    except ValueError as error:
        raise ValueError(f"{path}: {error}, and {remedy}") from None
    if count != len(file.tokens):
        raise ValueError(
            f"a column has values of every token: {path} has them of {count:,}, {file.path} has {len(file.tokens):,} "
            f"tokens: {remedy}"
        )
    expected = HEADER_BYTES + count * column.stored.itemsize
    if size != expected:
        raise ValueError(
            f"a column of {count} x {width} {column.dtype} has {expected} bytes: {path} has {size}, "
            f"{'cut short' if size < expected else 'too long'}: {remedy}"
        )
    if fingerprint.hex() != file.fingerprint:
        raise ValueError(
            f"a column must be of its tokens: {path} was written for other tokens than {file.path} has now: {remedy}"
        )
    return column, StoredTokens(opened, column.stored, HEADER_BYTES, count), content.hex()


class OpenedColumn(NamedTuple):
    """A column of all files of a text.

    Attributes:
        column: what it is.
        values: of each file, in order; with the SHA-256 of their content.
    """

    column: Column
    values: tuple[tuple[StoredTokens, str], ...]

    @property
    def fingerprint(self) -> str:
        """What identifies it: dtype, width, and the hash of its content; of several files, of their hashes."""
        hashes = [sha256 for _, sha256 in self.values]
        whole = hashes[0] if len(hashes) == 1 else hashlib.sha256(" ".join(hashes).encode()).hexdigest()
        return f"{self.column.width} x {self.column.dtype}, SHA-256 {whole[:_SHOWN_DIGITS]}"


def columns_of(asked: str, files: Sequence[SourceFile]) -> tuple[str, ...]:
    """Return the names of the columns that are read of a text.

    Args:
        asked: as data.columns names them.
        files: of the text; weights are read if one of them has them.

    Raises: ValueError: a name that no column can have.
    """
    names = [name.strip() for name in asked.split(",")] if asked else []
    for name in names:
        if name != _NO_WEIGHTS:
            check_name(name)
    if _NO_WEIGHTS in names:
        return tuple(dict.fromkeys(name for name in names if name not in (WEIGHTS, _NO_WEIGHTS)))
    if any(WEIGHTS in file.tokens.written_with or column_path(file.path, WEIGHTS).exists() for file in files):
        names = [WEIGHTS, *names]
    return tuple(dict.fromkeys(names))


def open_columns(files: Sequence[SourceFile], names: Sequence[str]) -> tuple[OpenedColumn, ...]:
    """Open columns of all files of a text, and have their tokens know them (`StoredTokens.columns`).

    Raises: ValueError: a file has no such column, or one that is damaged, of other tokens, or of another dtype or width
        than its neighbour's; one line.
    """
    found = [[open_column(file, name) for name in names] for file in files]
    for file, of_file in zip(files, found, strict=True):
        for (first, *_), (column, *_) in zip(found[0], of_file, strict=True):
            if first != column:
                raise ValueError(
                    f"a column must have one dtype and width in all files of a text: {first.name} is {first.width} x "
                    f"{first.dtype} in {files[0].path} and {column.width} x {column.dtype} in {file.path}: write one "
                    "of them again"
                )
        file.tokens.columns = {column.name: values for column, values, _ in of_file}
    return tuple(
        OpenedColumn(found[0][place][0], tuple(of_file[place][1:] for of_file in found)) for place in range(len(names))
    )
