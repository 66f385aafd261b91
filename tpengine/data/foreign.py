"""Token files of others, read where they are: datatrove's, and plain ids. Megatron's are read in megatron.py.

A file that is not what it should be is refused in one line, with path, values and remedy.

datatrove's tokens: `NAME.ds` has ids one behind the other, `NAME.ds.index` the end of each document (uint64).

`NAME.ds.metadata`, where it is written, says in its first line `tokenizer|bytes per id`, in its second how many ids.
Without it the bytes per id follow from the index: documents end where the file does. A `NAME.ds.loss` beside says which
ids are no targets, which we do not know how to heed: such a file is refused rather than read without it.

Source: datatrove.pipeline.tokens.tokenizer, version 0.10.

Plain ids: one behind the other, without a header, and beside `FILE` a `FILE.json` (or `NAME.json`) that says what they
are.

    {"dtype": "uint16", "vocab_size": 50257, "tokenizer": "gpt2", "tokenizer_sha256": "...", "begin": 0, "end": 50256,
     "tokens": 123, "documents": "NAME.starts"}

Only dtype is necessary. tokens is checked against the file's size. documents names a file beside, of uint64: the first
token of each document, ascending from 0. Other names are refused: one that is misspelt must not be passed over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpengine.data.source_files import About, SourceFile, check_pieces, fingerprint_of
from tpengine.data.stored_tokens import DocumentStarts, OpenFile, Starts, StoredTokens

REMEDY = "copy it again, or write it with tpengine data"
_DOCUMENT = np.dtype("<u8")
_DATATROVE_SIZES = (2, 4)
_UNKNOWN = "Unknown Tokenizer"
_MOST_METADATA_BYTES = 4096
_PLAIN_DTYPES = {name: np.dtype(f"<u{size}") for name, size in (("uint8", 1), ("uint16", 2), ("uint32", 4))}
_MOST_DESCRIPTION_BYTES = 1 << 16
_DESCRIBED: Mapping[str, type] = {
    "dtype": str,
    "vocab_size": int,
    "tokenizer": str,
    "tokenizer_sha256": str,
    "begin": int,
    "end": int,
    "tokens": int,
    "documents": str,
}
# Files that look plain and have a header of their own.
_HEADERS_OF_OTHERS = {
    b"\x93NUMPY": "numpy's header",
    b"PK\x03\x04": "the header of an archive",
    b"\x1f\x8b": "gzip's header",
}


def open_foreign(path: Path, what: str) -> OpenFile:
    """Open a file.

    Args:
        path: the file.
        what: it is, with its article.

    Raises:
        ValueError: it cannot be read, or is a directory or a device.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{what} must be a regular file: {path} is none: choose another")
        return OpenFile(path)
    except OSError as error:
        raise ValueError(f"{what} must be readable: {path}: {error.strerror}: correct that, or leave it out") from None


def read_foreign(file: OpenFile, offset: int, num_bytes: int) -> bytes:
    """Read at a position; fewer bytes only at the end of the file.

    Raises:
        ValueError: the disk fails.
    """
    try:
        return file.read(offset, num_bytes)
    except OSError as error:
        raise ValueError(f"a token file must be readable: {file.path}: {error.strerror}: correct that") from None


def size_of_foreign(file: OpenFile) -> int:
    """Return the file's size in bytes, as it is now.

    Raises:
        ValueError: the disk fails.
    """
    try:
        return file.identity().size
    except OSError as error:
        raise ValueError(f"a token file must be readable: {file.path}: {error.strerror}: correct that") from None


def is_datatrove(path: Path) -> bool:
    """Whether a file is called as datatrove calls its tokens."""
    return path.suffix == ".ds"


def open_datatrove(path: Path) -> SourceFile:
    """Open `NAME.ds` after checking its index, of which pieces are read.

    Raises:
        ValueError: an index or metadata that do not fit the file, in one line.
    """
    file = open_foreign(path, "a token file")
    index = open_foreign(path.with_name(f"{path.name}.index"), "datatrove's index")
    loss = path.with_name(f"{path.name}.loss")
    if loss.exists():
        raise ValueError(
            f"datatrove's ids must all be targets: {loss} says which are: remove it if all of them may be trained on"
        )
    num_bytes, index_bytes = size_of_foreign(file), size_of_foreign(index)
    if not index_bytes or index_bytes % _DOCUMENT.itemsize:
        raise ValueError(
            f"datatrove's index has {_DOCUMENT.itemsize} bytes per document: {index.path} has {index_bytes}: {REMEDY}"
        )
    starts = DatatroveStarts(index, index_bytes // _DOCUMENT.itemsize)
    num_tokens = starts.end
    tokenizer, size, said = _datatrove_metadata(path.with_name(f"{path.name}.metadata"))
    if said is not None and said != num_tokens:
        raise ValueError(f"datatrove's index and metadata must agree: {path}: {num_tokens} and {said} ids: {REMEDY}")
    if not num_tokens:
        raise ValueError(f"a token file must hold at least 1 token: {path} has 0: leave it out")
    sizes = [size] if size else _DATATROVE_SIZES
    if num_bytes not in [num_tokens * one for one in sizes]:
        raise ValueError(
            f"datatrove's {num_tokens} ids of {' or '.join(map(str, sizes))} bytes have "
            f"{' or '.join(str(num_tokens * one) for one in sizes)} bytes: {path} has {num_bytes}: {REMEDY}"
        )
    tokens = StoredTokens(file, np.dtype(f"<u{num_bytes // num_tokens}"), 0, num_tokens)
    check_pieces(starts)
    about = About(tokenizer=tokenizer)
    return SourceFile(path, "datatrove", tokens, starts, 0, about, "", fingerprint_of(file, index))


class DatatroveStarts(Starts):
    """Starts of documents, each where the one before it ends.

    Args:
        index: the open index.
        count: number of documents.
    """

    def __init__(self, index: OpenFile, count: int) -> None:
        self._ends = StoredTokens(index, _DOCUMENT, 0, count)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, place: slice) -> NDArray[np.int64]:
        begin, end, _ = place.indices(len(self))
        if end <= begin:
            return np.empty(0, dtype=np.int64)
        ends = self._ends[max(0, begin - 1) : end - 1].astype(np.int64)
        return ends if begin else np.concatenate([np.zeros(1, dtype=np.int64), ends])

    @property
    def path(self) -> Path:
        return self._ends.file.path

    @property
    def end(self) -> int:
        """Where the last document ends."""
        return int(self._ends[-1:][0])


def _datatrove_metadata(path: Path) -> tuple[str, int, int | None]:
    """Return the tokenizer's name, the bytes per id and the number of ids; empty, 0, None where it is not said."""
    if not path.exists():
        return "", 0, None
    content = read_foreign(open_foreign(path, "datatrove's metadata"), 0, _MOST_METADATA_BYTES)
    lines = content.decode(errors="replace").splitlines()
    name, bar, size = lines[0].rpartition("|") if lines else ("", "", "")
    count = lines[1] if len(lines) > 1 else ""
    # isdecimal() is true of digits that are not ASCII too; int() reads those.
    if not bar or size not in map(str, _DATATROVE_SIZES) or not (count.isdecimal() and len(count) < 20):
        raise ValueError(
            f"datatrove's metadata must be a line NAME|2 or NAME|4, then the number of ids: {path} has "
            f"{'|'.join(lines[:2])[:80]!r}: {REMEDY}, or remove it"
        )
    return "" if name.startswith(_UNKNOWN) else name, int(size), int(count)


def said_beside(path: Path) -> Path | None:
    """Return the file that says what plain ids are; None if there is none."""
    beside = [path.with_name(f"{path.name}.json"), path.with_suffix(".json")]
    return next((place for place in beside if place != path and place.is_file()), None)


def is_list_of_documents(path: Path) -> bool:
    """Whether a file is the documents of plain ids of the same name: what `NAME.json` beside says of it."""
    said = path.with_suffix(".json")
    if said == path or not said.is_file():
        return False
    try:
        return bool(_description(said).get("documents") == path.name)
    except ValueError:
        return False  # whoever opens the ids says what is wrong


def open_plain(path: Path, said: Path) -> SourceFile:
    """Open plain ids after checking what is said of them.

    Args:
        path: of the ids.
        said: as said_beside returns it.

    Raises:
        ValueError: what is said is not right, or does not fit the file; one line.
    """
    values = _description(said)
    dtype = _PLAIN_DTYPES[values["dtype"]]
    file = open_foreign(path, "a token file")
    num_bytes, start = size_of_foreign(file), read_foreign(file, 0, 8)
    for magic, what in _HEADERS_OF_OTHERS.items():
        if start.startswith(magic):
            raise ValueError(f"plain ids have no header: {path} begins with {what}: write the ids alone")
    num_tokens = num_bytes // dtype.itemsize
    if not num_tokens or num_bytes % dtype.itemsize or values.get("tokens", num_tokens) != num_tokens:
        raise ValueError(
            f"plain ids of {said}, {values.get('tokens', 'all')} of {dtype.itemsize} bytes, must be the whole file: "
            f"{path} has {num_bytes} bytes: {REMEDY}"
        )
    vocab_size = values.get("vocab_size", 0)
    about = About(
        values.get("begin"), values.get("end"), values.get("tokenizer", ""), values.get("tokenizer_sha256", "")
    )
    tokens = StoredTokens(file, dtype, 0, num_tokens)
    files, starts = [file, open_foreign(said, "what is said of plain ids")], None
    if "documents" in values:
        files.append(open_foreign(path.with_name(values["documents"]), "the list of documents"))
        starts = _plain_documents(files[-1], num_tokens)
    return SourceFile(path, "plain", tokens, starts, vocab_size, about, "", fingerprint_of(*files))


def _plain_documents(file: OpenFile, num_tokens: int) -> DocumentStarts:
    """Return where documents begin, after checking pieces of the list."""
    size = size_of_foreign(file)
    if not size or size % _DOCUMENT.itemsize:
        raise ValueError(
            f"a list of documents has {_DOCUMENT.itemsize} bytes for each: {file.path} has {size}: {REMEDY}"
        )
    starts = DocumentStarts(file, 0, size // _DOCUMENT.itemsize)
    check_pieces(starts)
    first, last = int(starts[:1][0]), int(starts[-1:][0])
    if first or not last < num_tokens:
        raise ValueError(
            f"documents begin at token 0 and within the file's {num_tokens}: {file.path} has {first} to {last}: "
            f"{REMEDY}"
        )
    return starts


def _description(said: Path) -> dict[str, Any]:
    """Return what is said of plain ids, each value of its kind."""
    content = read_foreign(open_foreign(said, "what is said of plain ids"), 0, _MOST_DESCRIPTION_BYTES + 1)
    try:
        values = json.loads(content.decode()) if len(content) <= _MOST_DESCRIPTION_BYTES else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"what is said of plain ids must be JSON: {said}: {str(error)[:120]!r}: correct it") from None
    problem = ""
    if not isinstance(values, dict):
        problem = f"is no object of at most {_MOST_DESCRIPTION_BYTES} bytes"
    elif values.get("dtype") not in list(_PLAIN_DTYPES):
        problem = f"has dtype {values.get('dtype')!r}"
    elif unknown := [name for name in values if name not in _DESCRIBED]:
        problem = f"has {unknown[0]!r}"
    elif wrong := [name for name, value in values.items() if type(value) is not _DESCRIBED[name]]:
        problem = f"has {wrong[0]} {str(values[wrong[0]])[:40]!r}"
    else:
        problem = _out_of_range(values)
    if problem:
        raise ValueError(
            f"what is said of plain ids must be an object with dtype, one of {', '.join(_PLAIN_DTYPES)}, and at most "
            f"{', '.join(name for name in _DESCRIBED if name != 'dtype')}: {said} {problem}: correct it"
        )
    assert isinstance(values, dict)
    return values


def _out_of_range(values: Mapping[str, Any]) -> str:
    """Return which value cannot be, if one cannot."""
    vocab_size, most = values.get("vocab_size", 0), 256 ** _PLAIN_DTYPES[values["dtype"]].itemsize
    if "vocab_size" in values and not 1 <= vocab_size <= most:
        return f"has vocab_size {vocab_size}, of {values['dtype']}"
    for mark in ("begin", "end"):
        if mark in values and not 0 <= values[mark] < (vocab_size or most):
            return f"has {mark} {values[mark]}, of a vocabulary of {vocab_size or most}"
    if not re.fullmatch("([0-9a-f]{64})?", values.get("tokenizer_sha256", "")):
        return "has a tokenizer_sha256 that is none"
    name = values.get("documents", "x")
    if not name or name != Path(name).name:
        return f"has documents {name!r}, which is no file beside it"
    return ""
