"""datatrove's tokens: `NAME.ds` has ids one behind the other, `NAME.ds.index` the end of each document (uint64).

`NAME.ds.metadata`, where it is written, says in its first line `tokenizer|bytes per id`, in its second how many ids.
Without it the bytes per id follow from the index: documents end where the file does. A `NAME.ds.loss` beside says which
ids are no targets, which we do not know how to heed: such a file is refused rather than read without it.

Source: datatrove.pipeline.tokens.tokenizer, version 0.10.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpengine.data.files.documents import Starts
from tpengine.data.files.foreign.problems import _REMEDY, _opened, _read, _size_of
from tpengine.data.files.one_file import About, SourceFile, check_pieces, fingerprint_of
from tpengine.data.files.stored_tokens import OpenFile, StoredTokens

_DOCUMENT = np.dtype("<u8")
_DATATROVE_SIZES = (2, 4)
_DATATROVE_UNKNOWN = "Unknown Tokenizer"
_MOST_METADATA_BYTES = 4096


def is_datatrove(path: Path) -> bool:
    """Whether a file is called as datatrove calls its tokens."""
    return path.suffix == ".ds"


def open_datatrove(path: Path) -> SourceFile:
    """Open `NAME.ds` after checking its index, of which pieces are read.

    Raises:
        ValueError: an index or metadata that do not fit the file, in one line.
    """
    file = _opened(path, "a token file")
    index = _opened(path.with_name(f"{path.name}.index"), "datatrove's index")
    loss = path.with_name(f"{path.name}.loss")
    if loss.exists():
        raise ValueError(
            f"datatrove's ids must all be targets: {loss} says which are: remove it if all of them may be trained on"
        )
    num_bytes, index_bytes = _size_of(file), _size_of(index)
    if not index_bytes or index_bytes % _DOCUMENT.itemsize:
        raise ValueError(
            f"datatrove's index has {_DOCUMENT.itemsize} bytes per document: {index.path} has {index_bytes}: {_REMEDY}"
        )
    starts = DatatroveStarts(index, index_bytes // _DOCUMENT.itemsize)
    num_tokens = starts.end
    tokenizer, size, said = _datatrove_metadata(path.with_name(f"{path.name}.metadata"))
    if said is not None and said != num_tokens:
        raise ValueError(f"datatrove's index and metadata must agree: {path}: {num_tokens} and {said} ids: {_REMEDY}")
    if not num_tokens:
        raise ValueError(f"a token file must hold at least 1 token: {path} has 0: leave it out")
    sizes = [size] if size else _DATATROVE_SIZES
    if num_bytes not in [num_tokens * one for one in sizes]:
        raise ValueError(
            f"datatrove's {num_tokens} ids of {' or '.join(map(str, sizes))} bytes have "
            f"{' or '.join(str(num_tokens * one) for one in sizes)} bytes: {path} has {num_bytes}: {_REMEDY}"
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
    content = _read(_opened(path, "datatrove's metadata"), 0, _MOST_METADATA_BYTES)
    lines = content.decode(errors="replace").splitlines()
    name, bar, size = lines[0].rpartition("|") if lines else ("", "", "")
    count = lines[1] if len(lines) > 1 else ""
    # isdecimal() is true of digits that are not ASCII too; int() reads those.
    if not bar or size not in map(str, _DATATROVE_SIZES) or not (count.isdecimal() and len(count) < 20):
        raise ValueError(
            f"datatrove's metadata must be a line NAME|2 or NAME|4, then the number of ids: {path} has "
            f"{'|'.join(lines[:2])[:80]!r}: {_REMEDY}, or remove it"
        )
    return "" if name.startswith(_DATATROVE_UNKNOWN) else name, int(size), int(count)
