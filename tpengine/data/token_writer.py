"""Write a token file document by document, with columns of values for each token beside it."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import ArrayLike

from tpengine.data.columns import Column, ColumnFile, column_path, values_of
from tpengine.data.source import open_file
from tpengine.data.source_files import About
from tpengine.data.token_file import (
    ALL_HEADER_BYTES,
    HEADER,
    MAGIC,
    WITH_DOCUMENTS,
    check_place,
    check_tokens,
    dtype_for,
    names_of_columns,
    write_starts,
)
from tpengine.files import written_beside


class TokenWriter:
    """Writes a token file that knows its documents, and its columns; a context manager.

    Everything is written beside its place and renamed when the block ends, the columns first; of a block that fails
    nothing stays. The file names its columns, so that it is not trained on without its weights if it is copied alone.

    Args:
        path: of the token file; its directory exists.
        vocab_size: all ids are below it; decides the dtype.
        columns: beside the tokens.
        about: marks and tokenizer.
        replaces: whether a token file that is there may be replaced.

    Attributes:
        num_tokens: so far.
        num_documents: so far.

    Raises:
        ValueError: a column that cannot be, a file that may not be replaced or cannot be written; one line.

    Example:
        with TokenWriter("chat.tokens", 32000, [Column("weights", "uint8")]) as writer:
            writer.add([1, 15, 7, 2], weights=[0, 0, 1, 1])

    Memory: 8 bytes a document.
    """

    def __init__(
        self,
        path: str | Path,
        vocab_size: int,
        columns: Sequence[Column] = (),
        about: About | None = None,
        *,
        replaces: bool = True,
    ) -> None:
        if not 1 <= vocab_size <= 2**32:
            raise ValueError(f"vocab_size must be at least 1 and at most 2**32: got {vocab_size}: use 256 for bytes")
        self._path, self._vocab_size, self._about = Path(path), vocab_size, about or About()
        self._declared = {column.name: column for column in columns}
        for column in columns:
            column.check()
        if len(self._declared) < len(columns):
            names = ", ".join(column.name for column in columns)
            raise ValueError(f"columns of a token file must have different names: got {names}: leave one out")
        self._names = names_of_columns(self._declared)
        self._content, self._lengths, self._largest = hashlib.sha256(), array("q"), 0
        self.num_tokens = 0
        try:
            check_place(self._path, replaces)
        except OSError as error:
            raise self._unwritable(error) from None

    @property
    def num_documents(self) -> int:
        """Documents so far."""
        return len(self._lengths)

    def __enter__(self) -> TokenWriter:
        with ExitStack() as stack:
            try:
                # Renamed in the opposite order: the tokens when their columns are there.
                self._beside = stack.enter_context(written_beside(self._path))
                self._file = stack.enter_context(self._beside.open("wb"))
                self._columns = {
                    name: stack.enter_context(
                        ColumnFile(
                            stack.enter_context(written_beside(column_path(self._path, name))), column, self._path
                        )
                    )
                    for name, column in self._declared.items()
                }
                self._file.write(bytes(ALL_HEADER_BYTES))
            except OSError as error:
                raise self._unwritable(error) from None
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stack.__exit__(kind, error, trace)
            return
        try:
            with self._stack:
                self._finish()
        except OSError as problem:
            raise self._unwritable(problem) from None

    def add(self, tokens: ArrayLike, **values: ArrayLike) -> None:
        """Write a document.

        Args:
            tokens: ids [n], at least one, in [0, vocab_size).
            values: of each column, by its name: [n], or [n, width].

        Raises: ValueError: an id outside the vocabulary, another column, values of another number of tokens, another
            shape, or that the column's dtype does not hold; a file that cannot be written.
        """
        ids = np.asarray(tokens)
        if ids.ndim != 1 or not ids.size:
            raise ValueError(
                f"a document of a token file has at least 1 token: got ids of shape {list(ids.shape)}: leave it out"
            )
        check_tokens(ids, self._vocab_size, "vocab_size")
        if values.keys() != self._columns.keys():
            raise ValueError(
                f"a document has all columns of its file: {', '.join(self._columns) or 'none'}: got "
                f"{', '.join(values) or 'none'}: give each, zeros where there is nothing"
            )
        try:
            # All of a document is right, or nothing of it is written.
            stored = {name: values_of(self._columns[name].column, of, self.num_tokens) for name, of in values.items()}
            for name, of_column in stored.items():
                if len(of_column) != len(ids):
                    raise ValueError(
                        f"a column has values of every token: document {self.num_documents} has {len(ids)} tokens and "
                        f"{len(of_column)} values of {name}: give each token its values, 0 where it has none"
                    )
            for name, of_column in stored.items():
                self._columns[name].add(of_column)
            content = np.ascontiguousarray(ids, dtype=dtype_for(self._vocab_size)).data
            self._content.update(content)
            self._file.write(content)
        except OSError as error:
            raise self._unwritable(error) from None
        self._lengths.append(len(ids))
        self.num_tokens += len(ids)
        self._largest = max(self._largest, int(ids.max()))

    def _finish(self) -> None:
        """Write the headers; have everything on disk."""
        if not self.num_tokens:
            raise ValueError(f"a token file must hold at least 1 token: got none for {self._path}: check the source")
        about = self._about._replace(largest=self._largest)
        more = write_starts(self._file, self._path, self._lengths, self.num_tokens, about)
        itemsize = dtype_for(self._vocab_size).itemsize
        head = MAGIC, WITH_DOCUMENTS, itemsize, self._vocab_size, self.num_tokens, self._content.digest()
        self._file.seek(0)
        self._file.write(HEADER.pack(*head) + more + self._names)
        self._file.flush()
        os.fsync(self._file.fileno())
        fingerprint = open_file(self._beside).fingerprint
        for column in self._columns.values():
            column.finish(self.num_tokens, fingerprint)

    def _unwritable(self, error: OSError) -> ValueError:
        reason = error.strerror or error
        return ValueError(f"a token file must be writable: {self._path}: {reason}: correct that or choose another file")
