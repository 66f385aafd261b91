"""Write documents to one token file, or to the shards of a directory, so that a killed call can be continued.

Until all is written everything is in `.OUT.part` beside the output, which then takes its place: a reader finds all or
nothing. In it are finished shards, the ids and the documents' lengths of the one that is being written, and a journal:
how far the files below were written when a certain document had ended. Whoever goes on cuts both to that, and reads on
behind that document. The bytes are those of a call that was never stopped.

A shard ends with the document in which it reaches the asked number of tokens.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tpengine.data.documents import BEGINNING, DocumentPlace
from tpengine.data.encode import TokenChunk
from tpengine.data.source_files import About
from tpengine.data.token_file import (
    ALL_HEADER_BYTES,
    HEADER,
    MAGIC,
    WITH_DOCUMENTS,
    check_place,
    check_tokens,
    dtype_for,
    write_starts,
)
from tpengine.files import sync_directory, write_beside

_LEAST_TOKENS = 2
_LENGTH = np.dtype("<u8")
_SECONDS_BETWEEN_NOTES = 5.0
_READ_BYTES = 1 << 20
_IDS, _LENGTHS, _JOURNAL, _DONE = "ids", "lengths", "journal.json", "done"


@dataclass
class WriteProgress:
    """How far the text has become shards, at the end of a document.

    Attributes:
        asked: hash of what was asked for, which must be the same to go on.
        sources: of each file that has been read wholly, what identifies it.
        place: where reading goes on.
        shard: number of the one that is being written.
        tokens, documents, largest: of it.
        all_tokens, all_documents: of all shards.
        num_short: documents of fewer than 2 tokens, which are left out.
        closed: whether the shard before this one may still lie there as ids.
    """

    asked: str
    sources: list[str] = field(default_factory=list)
    place: DocumentPlace = BEGINNING
    shard: int = 0
    tokens: int = 0
    documents: int = 0
    largest: int = 0
    all_tokens: int = 0
    all_documents: int = 0
    num_short: int = 0
    closed: bool = False


class ShardWriter:
    """A writer of documents; a context manager, which keeps or removes what was begun.

    Args:
        out: the file, or with `shard_tokens` the directory, to be made.
        vocab_size: all ids are below it; decides the dtype.
        about: marks and tokenizer.
        asked: identifies what was asked for.
        sources: identifies each file of the text, in order.
        shard_tokens: tokens of a shard; None for one file.

    Attributes:
        progress: so far; its place is where reading has to begin.
        was_begun: whether an earlier call is continued.

    Raises:
        ValueError: an output that is there, or cannot be written; one that was begun with other words or text, or is
            being written now.
    """

    def __init__(
        self,
        out: Path,
        vocab_size: int,
        about: About,
        asked: str,
        sources: list[str],
        shard_tokens: int | None = None,
    ) -> None:
        with _writable(out):
            _check_new(out, is_directory=shard_tokens is not None)
        self._out, self._vocab_size, self._about, self._sources = out, vocab_size, about, sources
        self._most, self._dtype = shard_tokens, dtype_for(vocab_size)
        self._room = begun_at(out)
        self._held, self._open, self._noted = np.empty(0, self._dtype), 0, time.monotonic()
        self.progress = WriteProgress(asked)
        with _writable(out):
            self._room.mkdir(exist_ok=True)
            self._lock = self._locked()
            try:
                self.was_begun = self._find()
                self._ids, self._lengths = self._opened(_IDS), self._opened(_LENGTHS)
                self._continue()
            except BaseException:
                self._lock.close()
                raise

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None and isinstance(error, KeyboardInterrupt) and self.progress.all_documents:
            with contextlib.suppress(OSError):
                self._note()
        for file in (self._ids, self._lengths, self._lock):
            with contextlib.suppress(OSError):
                file.close()
        if error is None or not (self._room / _JOURNAL).exists():
            shutil.rmtree(self._room, ignore_errors=True)
        elif isinstance(error, KeyboardInterrupt):
            error.add_note(
                f"{self.progress.all_tokens:,} tokens are kept in {self._room}; the same command goes on behind them"
            )

    def add(self, chunk: TokenChunk) -> None:
        """Write what ends, and what goes on, in a chunk.

        Raises: ValueError: an id outside the vocabulary; a file that cannot be written.
        """
        check_tokens(chunk.ids, self._vocab_size, "vocab_size")
        ids = np.concatenate([self._held, chunk.ids.astype(self._dtype, copy=False)])
        ends = np.array(chunk.ends, dtype=np.int64) + len(self._held)
        with _writable(self._out):
            behind = int(ends[-1]) if len(ends) else 0
            if behind or len(ends):
                self._add_documents(ids[:behind], ends, chunk.after)
            rest = ids[behind:]
            # Of a document that goes on nothing is written before it is long enough to stay.
            self._held = rest[:0]
            if self._open or len(rest) >= _LEAST_TOKENS:
                self._open += len(rest)
                self._write(rest)
            else:
                self._held = rest
            if time.monotonic() - self._noted > _SECONDS_BETWEEN_NOTES:
                self._note()

    def finish(self) -> WriteProgress:
        """Close the last shard and put everything in its place; return what was written.

        Raises: ValueError: no document; a file that cannot be written.
        """
        if not self.progress.all_tokens:
            short = self.progress.num_short
            raise ValueError(
                f"a token file must hold at least 1 document of {_LEAST_TOKENS} tokens: got none for {self._out}"
                f"{f', {short} shorter ones' if short else ''}: check the source"
            )
        with _writable(self._out):
            if self.progress.tokens:
                self._close()
            done = self._room / _DONE
            sync_directory(done)
            made = done if self._most is not None else self._shard(0)
            os.rename(made, self._out)
            sync_directory(self._out.parent)
        return self.progress

    def _add_documents(self, ids: NDArray[Any], ends: NDArray[np.int64], after: list[DocumentPlace]) -> None:
        """Write documents that end, the first of which may have begun before; close shards that are full."""
        own = np.diff(ends, prepend=0)
        lengths = own.copy()
        lengths[0] += self._open
        self._open = 0
        keep = lengths >= _LEAST_TOKENS
        if not keep.all():
            self.progress.num_short += int((~keep).sum())
            ids = ids[np.repeat(keep, own)]
        places = [place for place, stays in zip(after, keep.tolist(), strict=True) if stays]
        own, lengths = own[keep], lengths[keep]
        while len(lengths):
            full = np.cumsum(lengths) + self.progress.tokens >= self._most if self._most is not None else np.zeros(1)
            num = int(np.argmax(full)) + 1 if full.any() else len(lengths)
            num_ids = int(own[:num].sum())
            self._write(ids[:num_ids])
            self._lengths.write(lengths[:num].astype(_LENGTH).tobytes())
            self.progress.place = places[num - 1]
            total = int(lengths[:num].sum())
            self.progress.tokens += total
            self.progress.all_tokens += total
            self.progress.documents += num
            self.progress.all_documents += num
            ids, own, lengths, places = ids[num_ids:], own[num:], lengths[num:], places[num:]
            if full.any():
                self._close()
        self.progress.place = after[-1]

    def _write(self, ids: NDArray[Any]) -> None:
        content = np.ascontiguousarray(ids).data
        self._content.update(content)
        self._ids.write(content)
        self.progress.largest = max(self.progress.largest, int(ids.max(initial=0)))

    def _close(self) -> None:
        """Make a shard of what was written; go on with the next one."""
        progress = self.progress
        self._lengths.flush()
        about = self._about._replace(largest=progress.largest)
        more = write_starts(self._ids, self._out, self._sizes(), progress.tokens, about)
        head = MAGIC, WITH_DOCUMENTS, self._dtype.itemsize, self._vocab_size, progress.tokens, self._content.digest()
        self._ids.seek(0)
        self._ids.write(HEADER.pack(*head) + more)
        self._ids.flush()
        os.fsync(self._ids.fileno())
        self._ids.close()
        self._lengths.close()
        progress.shard += 1
        progress.tokens = progress.documents = progress.largest = 0
        progress.closed = True
        self._write_journal()
        os.rename(self._room / _IDS, self._shard(progress.shard - 1))
        progress.closed = False
        self._start_shard()

    def _sizes(self) -> Iterator[int]:
        with (self._room / _LENGTHS).open("rb") as file:
            while content := file.read(_READ_BYTES):
                yield from np.frombuffer(content, _LENGTH).tolist()

    def _start_shard(self) -> None:
        (self._room / _IDS).write_bytes(b"")
        (self._room / _LENGTHS).write_bytes(b"")
        self._ids, self._lengths = self._opened(_IDS), self._opened(_LENGTHS)
        self._ids.write(bytes(ALL_HEADER_BYTES))
        self._content = hashlib.sha256()

    def _note(self) -> None:
        """Have everything until the last whole document on disk, and say so in the journal."""
        for file in (self._ids, self._lengths):
            file.flush()
            os.fsync(file.fileno())
        self._write_journal()
        self._noted = time.monotonic()

    def _write_journal(self) -> None:
        self.progress.sources = self._sources[: self.progress.place.file]
        write_beside(self._room / _JOURNAL, json.dumps(asdict(self.progress)).encode(), durable=True)

    def _find(self) -> bool:
        """Take over the journal of an earlier call, if there is one that can be continued."""
        (self._room / _DONE).mkdir(exist_ok=True)
        journal = self._room / _JOURNAL
        if not journal.exists():
            return False
        asked, change = self.progress.asked, f"remove {self._room} to begin anew"
        try:
            values = json.loads(journal.read_bytes().decode())
            found = WriteProgress(**{**values, "place": DocumentPlace(*values["place"])})
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"what was begun must have a whole journal: {journal} is damaged: {change}") from None
        if found.asked != asked:
            raise ValueError(
                f"what was begun must be continued by the same command: {self._room} was begun with another: repeat "
                f"that, or {change}"
            )
        now = self._sources[: found.place.file]
        if found.sources != now:
            changed = next((b for a, b in zip(found.sources, now, strict=False) if a != b), "a file is missing")
            raise ValueError(
                f"what was begun must be continued with the same text: {changed} is not what {self._room} was begun "
                f"with: restore it, or {change}"
            )
        self.progress = found
        return True

    def _continue(self) -> None:
        """Cut the files to what the journal says, and hash again what stays."""
        progress, ids, lengths = self.progress, self._room / _IDS, self._room / _LENGTHS
        if progress.closed:
            if not self._shard(progress.shard - 1).exists():
                os.rename(ids, self._shard(progress.shard - 1))
            progress.closed = False
        if not progress.tokens:
            self._ids.close()
            self._lengths.close()
            self._start_shard()
            return
        end = ALL_HEADER_BYTES + progress.tokens * self._dtype.itemsize
        if ids.stat().st_size < end or lengths.stat().st_size < progress.documents * _LENGTH.itemsize:
            raise ValueError(
                f"what was begun must be whole: {ids} is shorter than its journal says: remove {self._room} to begin "
                "anew"
            )
        self._ids.truncate(end)
        self._lengths.truncate(progress.documents * _LENGTH.itemsize)
        self._content = hashlib.sha256()
        with ids.open("rb") as file:
            file.seek(ALL_HEADER_BYTES)
            while content := file.read(_READ_BYTES):
                self._content.update(content)
        self._ids.seek(0, os.SEEK_END)
        self._lengths.seek(0, os.SEEK_END)

    def _shard(self, number: int) -> Path:
        return self._room / _DONE / f"{number:05}.tokens"

    def _opened(self, name: str) -> BinaryIO:
        path = self._room / name
        path.touch()
        return path.open("r+b")

    def _locked(self) -> BinaryIO:
        """Hold what was begun against another call; released when this process ends, however."""
        file = (self._room / "lock").open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise ValueError(
                f"an output must be written by one command: another one writes {self._out} now: wait for it, or choose "
                "another output"
            ) from None
        return file


def _check_new(out: Path, *, is_directory: bool) -> None:
    """Raise ValueError if an output is there; OSError if it cannot be looked for."""
    if is_directory and out.exists():
        raise ValueError(f"a directory of token files must be new: {out} is there: remove it first, or choose another")
    check_place(out, replaces=False)


def begun_at(out: Path) -> Path:
    """Return where an output is before it is whole."""
    return out.with_name(f".{out.name}.part")


@contextlib.contextmanager
def _writable(out: Path) -> Iterator[None]:
    """Say in one line that the output cannot be written."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"a token file must be writable: {out}: {reason}: correct that or choose another file"
        ) from None
