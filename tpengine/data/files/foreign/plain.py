"""Ids one behind the other, without a header, and beside `FILE` a `FILE.json` (or `NAME.json`) that says what they are.

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

from tpengine.data.files.documents import DocumentStarts
from tpengine.data.files.foreign.problems import _REMEDY, _opened, _read, _size_of
from tpengine.data.files.one_file import About, SourceFile, check_pieces, fingerprint_of
from tpengine.data.files.stored_tokens import OpenFile, StoredTokens

_PLAIN_DTYPES = {name: np.dtype(f"<u{size}") for name, size in (("uint8", 1), ("uint16", 2), ("uint32", 4))}
_DOCUMENT = np.dtype("<u8")
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
    file = _opened(path, "a token file")
    num_bytes, start = _size_of(file), _read(file, 0, 8)
    for magic, what in _HEADERS_OF_OTHERS.items():
        if start.startswith(magic):
            raise ValueError(f"plain ids have no header: {path} begins with {what}: write the ids alone")
    num_tokens = num_bytes // dtype.itemsize
    if not num_tokens or num_bytes % dtype.itemsize or values.get("tokens", num_tokens) != num_tokens:
        raise ValueError(
            f"plain ids of {said}, {values.get('tokens', 'all')} of {dtype.itemsize} bytes, must be the whole file: "
            f"{path} has {num_bytes} bytes: {_REMEDY}"
        )
    vocab_size = values.get("vocab_size", 0)
    about = About(
        values.get("begin"), values.get("end"), values.get("tokenizer", ""), values.get("tokenizer_sha256", "")
    )
    tokens = StoredTokens(file, dtype, 0, num_tokens)
    files, starts = [file, _opened(said, "what is said of plain ids")], None
    if "documents" in values:
        files.append(_opened(path.with_name(values["documents"]), "the list of documents"))
        starts = _plain_documents(files[-1], num_tokens)
    return SourceFile(path, "plain", tokens, starts, vocab_size, about, "", fingerprint_of(*files))


def _plain_documents(file: OpenFile, num_tokens: int) -> DocumentStarts:
    """Return where documents begin, after checking pieces of the list."""
    size = _size_of(file)
    if not size or size % _DOCUMENT.itemsize:
        raise ValueError(
            f"a list of documents has {_DOCUMENT.itemsize} bytes for each: {file.path} has {size}: {_REMEDY}"
        )
    starts = DocumentStarts(file, 0, size // _DOCUMENT.itemsize)
    check_pieces(starts)
    first, last = int(starts[:1][0]), int(starts[-1:][0])
    if first or not last < num_tokens:
        raise ValueError(
            f"documents begin at token 0 and within the file's {num_tokens}: {file.path} has {first} to {last}: "
            f"{_REMEDY}"
        )
    return starts


def _description(said: Path) -> dict[str, Any]:
    """Return what is said of plain ids, each value of its kind."""
    content = _read(_opened(said, "what is said of plain ids"), 0, _MOST_DESCRIPTION_BYTES + 1)
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
