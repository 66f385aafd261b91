"""A source: the tokens of one or several files, one behind the other, in whatever formats they are.

Its files are one, those of a directory, those of a glob, or a list of such, in a fixed order. How many tokens there
are, where documents begin and what is held out follows from the headers and the order of the files alone. Nothing is
read through at the start, no index is built: a file costs its header, and where its content has no hash some pieces of
it.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpengine.data.columns import MAGIC as COLUMN_MAGIC
from tpengine.data.foreign import is_datatrove, is_list_of_documents, open_datatrove, open_plain, said_beside
from tpengine.data.megatron import is_megatron, open_megatron
from tpengine.data.source_files import (
    About,
    DocumentSourceTokens,
    SourceFile,
    SourceStarts,
    SourceTokens,
    fingerprint_of,
)
from tpengine.data.stored_tokens import DocumentTokens, StoredTokens, Tokens
from tpengine.data.token_file import FIT_MAGIC, MAGIC, TokenFile, open_tokens

# Of a file's head and end: its header, and of ours where most documents begin.
_ANNOUNCED_BYTES = 1 << 14
_REMEDY = "write one with tpengine data, or name its files: DIR, 'DIR/*.bin', or a,b,c"


def files_of(path: str) -> list[Path]:
    """Return the files of tokens that a path names.

    Args:
        path: a file; a directory, of which all token files are taken in the order of their names; a glob, of which all
            matches are, in the order of their paths (the companions of foreign files are left out); or several of
            these with commas between, in their order. A file whose own name has such characters is that file.

    Raises:
        ValueError: nothing there, no token file in a directory, none that matches, a file that is named twice.
    """
    if Path(path).exists() or "," not in path:
        found = _files_of_one(path)
    else:
        parts = [part.strip() for part in path.split(",")]
        if not all(parts):
            raise ValueError(f"a list of token files must have a name between its commas: got {path!r}: correct it")
        found = [file for part in parts for file in _files_of_one(part)]
    seen: dict[Path, Path] = {}
    for file in found:
        first = seen.setdefault(file.resolve(), file)
        if first is not file:
            raise ValueError(f"a source must have a file once: {file} is {first} again: leave one out of {path}")
    return found


def is_token_file(path: Path) -> bool:
    """Whether a file is one of tokens, by its companions or its first bytes."""
    if not path.is_file():
        return False
    if is_datatrove(path) or is_megatron(path):
        return True
    with path.open("rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            return True
    return path.suffix != ".json" and not _is_companion(path) and said_beside(path) is not None


def _files_of_one(path: str) -> list[Path]:
    place = Path(path)
    if place.is_dir():
        children = [child for child in sorted(place.iterdir()) if not child.name.startswith(".")]
        _announce(children)
        files = [child for child in children if _is_token_file(child)]
        if not files:
            raise ValueError(f"a directory of tokens must have a token file: none in {place}: {_REMEDY}")
        return files
    if place.exists() and not place.is_file():
        raise ValueError(f"a token file must be a regular file: {place} is a device or pipe: choose another")
    if place.exists() or not glob.has_magic(path):
        return [place]
    # A glob that takes all takes companions too.
    found = [Path(match) for match in sorted(glob.glob(path, recursive=True))]
    files = [match for match in found if match.is_file() and not _is_companion(match)]
    if not files:
        raise ValueError(f"a glob of token files must match one: none is {path!r}: {_REMEDY}")
    _announce(files)
    return files


def _announce(files: Iterable[Path]) -> None:
    """Have the system begin to read what opening files will ask for, of all at once: disks answer so much sooner.

    1,000 files that are not in memory are open after 0.3 s instead of 0.8 s. Whatever is wrong with a file is said by
    whoever opens it.
    """
    for path in files:
        with contextlib.suppress(OSError):
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                end = max(0, os.fstat(number).st_size - _ANNOUNCED_BYTES)
                os.posix_fadvise(number, 0, _ANNOUNCED_BYTES, os.POSIX_FADV_WILLNEED)
                os.posix_fadvise(number, end, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(number)


def _is_token_file(path: Path) -> bool:
    try:
        return is_token_file(path)
    except OSError as error:
        raise ValueError(f"a token file must be readable: {path}: {error.strerror}: correct that") from None


def _is_companion(path: Path) -> bool:
    """Whether a file only says something of another one beside it."""
    name = path.name
    if path.suffix == ".idx":
        return path.with_suffix(".bin").is_file()
    if path.suffix in (".index", ".metadata", ".loss"):
        return name.endswith((".ds.index", ".ds.metadata", ".ds.loss"))
    if path.suffix == ".fit":
        # NAME.S.fit, see fit_index.py; also one whose text is no longer there.
        return path.with_suffix("").with_suffix("").is_file() or _begins_with(path, FIT_MAGIC)
    if path.suffix == ".column":
        # NAME.COLUMN.column, see columns.py; also one whose text is no longer there.
        return path.with_suffix("").with_suffix("").is_file() or _begins_with(path, COLUMN_MAGIC)
    if path.suffix == ".json":
        return path.with_suffix("").is_file() or any(
            other.suffix != ".json" and other.is_file() for other in path.parent.glob(f"{glob.escape(path.stem)}.*")
        )
    return is_list_of_documents(path)


def _begins_with(path: Path, magic: bytes) -> bool:
    """Whether a file can be read and begins so."""
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False


class Source:
    """Several token files as one; what is said of it is what its files say together.

    Args:
        path: as the user wrote it.
        files: in order.

    Attributes:
        tokens: of all files; read when they are sliced, a DocumentSourceTokens if all files know their documents.
        vocab_size: the largest of the files'; 0 if none says.
        about: marks and tokenizer, as far as the files know them; its `largest` is the largest id if all files say one.

    Raises:
        ValueError: files of different tokenizers or marks.

    Example:
        source = open_source("corpus/")
        source.num_tokens, source.num_documents, source.read(10**9, 2049), source.document_starts(10**9, 10**9 + 2049)
    """

    def __init__(self, path: str, files: Sequence[SourceFile]) -> None:
        self.path, self.files = path, tuple(files)
        self.about = _together(self.files)
        self.vocab_size = max(file.vocab_size for file in files)
        self._starts = SourceStarts(self.files) if all(file.starts is not None for file in files) else None
        self.tokens: SourceTokens = (
            SourceTokens(self.files) if self._starts is None else DocumentSourceTokens(self.files, self._starts)
        )

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all files."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int | None:
        """The number of documents of all files; None if a file does not know its documents."""
        return None if self._starts is None else len(self._starts)

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The widest dtype of the files' ids, in which all are read."""
        return self.tokens.dtype

    def read(self, start: int, count: int) -> Tokens:
        """Read tokens start, start + 1, ..., across files."""
        return self.tokens[start : start + count]

    def document_starts(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return the first tokens of all documents that begin in [begin, end), ascending.

        Raises: ValueError: a file does not know its documents, and which.
        """
        if not isinstance(self.tokens, DocumentSourceTokens):
            raise ValueError(
                f"documents need files that know where they begin: {self.without_documents()} does not say: write it "
                "again with tpengine data, or leave it out"
            )
        return self.tokens.document_starts(begin, end)

    def without_documents(self) -> Path | None:
        """Return the first file that does not know its documents; None if all do."""
        return next((file.path for file in self.files if file.starts is None), None)

    @cached_property
    def fingerprints(self) -> tuple[tuple[str, str], ...]:
        """What identifies each file: its name, and number of tokens, dtype and hash in a line."""
        return tuple(
            (file.path.name, f"{len(file.tokens)} {file.tokens.dtype} tokens, SHA-256 {file.fingerprint}")
            for file in self.files
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of what identifies the files, in order; their names and places do not count."""
        lines = "\n".join(line for _, line in self.fingerprints)
        return hashlib.sha256(lines.encode()).hexdigest()

    def text(self) -> TokenFile:
        """Return the source as what samples are cut from.

        One file of our own is what open_tokens returns. Of others the hash is the fingerprint; files whose content has
        a hash of its own are its parts, to be checked while training goes on.
        """
        parts = tuple(
            TokenFile(file.tokens, file.vocab_size, file.sha256, file.about) for file in self.files if file.sha256
        )
        known = self.about if self._starts is not None else None
        return TokenFile(self.tokens, self.vocab_size, self.fingerprint, known, parts)


def open_source(path: str) -> Source:
    """Open all files that a path names: a file, a directory, a glob, or a list with commas.

    Raises: ValueError: as files_of; a file that is damaged; files that do not fit each other. One line.
    Cost: some 100 us per file in the page cache.
    """
    return Source(path, [open_file(file) for file in files_of(path)])


def open_text(path: str) -> TokenFile:
    """Open what a run is to read: a source of one file or several; one file of our own as open_tokens does.

    Raises: ValueError: as open_source.
    """
    files = files_of(path)
    if len(files) == 1 and _is_ours(files[0]):
        return open_tokens(files[0])
    return Source(path, [open_file(file) for file in files]).text()


def open_file(path: Path) -> SourceFile:
    """Open one file of a source, in whatever format it is.

    Raises: ValueError: it is damaged, or in no format that is known.
    """
    if not _is_ours(path):
        if is_datatrove(path):
            return open_datatrove(path)
        if is_megatron(path):
            return open_megatron(path)
        said = said_beside(path)
        if said is not None:
            return open_plain(path, said)
        raise ValueError(
            f"a token file must be written by tpengine data, or have what others write beside it: {path} starts with "
            f"neither {MAGIC!r} nor is {path.with_suffix('.idx').name} or {path.name}.json there: copy that too, or "
            f"write one with: tpengine data --from DIR --out {path.with_name(path.name + '.tokens')}"
        )
    text = open_tokens(path)
    assert isinstance(text.tokens, StoredTokens)
    starts = text.tokens.starts if isinstance(text.tokens, DocumentTokens) else None
    about = text.about or About()
    identity = text.sha256 + about.starts_sha256 or fingerprint_of(text.tokens.file)
    digest = hashlib.sha256(f"{identity} {about.begin} {about.end}".encode()).hexdigest()
    kind = "TPTOKENS 1" if starts is None else "TPTOKENS 2"
    return SourceFile(path, kind, text.tokens, starts, text.vocab_size, about, text.sha256, digest)


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return True  # open_tokens says what is wrong with it, and of a directory too


def _together(files: Sequence[SourceFile]) -> About:
    """Return what files say of marks and tokenizer; raise ValueError if two say different things."""
    agreed: dict[str, tuple[object, SourceFile]] = {}
    for file in files:
        for name, value in _said(file):
            had, first = agreed.setdefault(name, (value, file))
            if had != value:
                raise ValueError(
                    f"files of one source must have one {name}: {first.path} has {had}, {file.path} {value}: write "
                    "them again with one, or make a source of each"
                )
    largest = 0
    if all(file.about.largest for file in files):
        largest = max(file.about.largest for file in files)
    marks = files[0].about
    name = next((file.about.tokenizer for file in files if file.about.tokenizer), "")
    sha256 = next((file.about.tokenizer_sha256 for file in files if file.about.tokenizer_sha256), "")
    starts = hashlib.sha256(" ".join(file.about.starts_sha256 for file in files).encode()).hexdigest()
    return About(marks.begin, marks.end, name, sha256, largest, starts)


def _said(file: SourceFile) -> Iterator[tuple[str, object]]:
    """Yield what a file says that its neighbours must say too."""
    about = file.about
    if about.tokenizer_sha256:
        yield "tokenizer (SHA-256)", about.tokenizer_sha256
    elif about.tokenizer:
        yield "tokenizer", about.tokenizer
    if file.starts is not None and file.sha256:
        yield "begin of documents", about.begin
        yield "end of documents", about.end
        # Without a tokenizer tokens are bytes, or came as numbers.
        yield "kind of tokens", "a tokenizer's" if about.tokenizer_sha256 else "bytes or numbers"
