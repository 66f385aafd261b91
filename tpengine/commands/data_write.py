"""`tpengine data`: text files become token files. No torch.

Everything is written beside its place and renamed when it is whole; what a killed command has begun is continued by the
next one (data_shards.py).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from tpengine.commands.data_shards import ShardWriter, WriteProgress
from tpengine.data.chat import WeightedTokens
from tpengine.data.documents import PIPE, DocumentReader
from tpengine.data.encode import BYTE_VOCAB_SIZE, TokenChunk, bytes_of, tokens_of
from tpengine.data.source_files import About
from tpengine.data.text_files import find_files, why_no_text
from tpengine.data.token_file import MAGIC
from tpengine.data.workers import Pool
from tpengine.observe.safe_console import SafeConsole
from tpengine.tokenizer import TextTokenizer

BYTES = "bytes"

# Where the output is no terminal.
_PLAIN_LINES = 20
# Of files that do not look like text; then they are counted.
_MOST_WARNINGS = 3
# A process takes as long to start as the library takes for some MB.
_LEAST_BYTES_PER_WORKER = 4 << 20

_Ids = TypeVar("_Ids", TokenChunk, WeightedTokens)


@dataclass(frozen=True)
class WriteOptions:
    """What `tpengine data` was asked for.

    Attributes:
        sources: files, and directories to look in; or PIPE.
        pattern: which files of a directory.
        field: of a line of JSONL or a row, has the text.
        tokenizer: the directory of a tokenizer, or "bytes".
        begin, end: what each document begins or ends with: an id, a token as it is written, or empty for the one that
            the tokenizer declares; None for nothing.
        out: the token file, or the directory of shards.
        shard_tokens: tokens of a shard; None for one file.
        workers: processes that encode; None for as many as there are cores.
    """

    sources: Sequence[Path]
    pattern: str
    field: str
    tokenizer: str
    begin: str | None
    end: str | None
    out: Path
    shard_tokens: int | None = None
    workers: int | None = None


@dataclass(frozen=True)
class Encoding:
    """How documents become ids: by a tokenizer, or as bytes.

    Attributes:
        tokenizer: None for bytes.
        marks: ids, by "begin" and "end".
        vocab_size: of the file.
        model: what a run needs to be told besides the file.
        of_model: the vocabulary of the model beside the tokenizer, if there is one.
    """

    tokenizer: TextTokenizer | None
    marks: dict[str, int]
    vocab_size: int
    model: str
    of_model: int | None

    def about(self) -> About:
        """Return what the file says of it."""
        begin, end = self.marks.get("begin"), self.marks.get("end")
        if self.tokenizer is None:
            return About(begin, end)
        return About(begin, end, self.tokenizer.directory.resolve().name, self.tokenizer.sha256())


def write_data(options: WriteOptions) -> None:
    """Write token files, and say what is in them.

    Raises:
        ValueError: a mistake of the user, in one line.
    """
    is_pipe = PIPE in options.sources
    if is_pipe and len(options.sources) > 1:
        raise ValueError(f"--from - must stand alone: got {' '.join(map(str, options.sources))}: leave the rest out")
    paths = [PIPE] if is_pipe else find_files(options.sources, options.pattern, options.out, _is_token_file)
    encoding = encoding_of(options.tokenizer, options.begin, options.end)
    console = SafeConsole(soft_wrap=True)
    about = encoding.about()
    asked = _asked(options, encoding, about)
    with ShardWriter(options.out, encoding.vocab_size, about, asked, _sources(paths), options.shard_tokens) as shards:
        if shards.was_begun:
            had = shards.progress
            console.print(f"going on behind {had.all_tokens:,} tokens of {had.all_documents:,} documents")
        looks = _Looks(console)
        documents = DocumentReader(paths, options.field, shards.progress.place, looks.at)
        with ExitStack() as stack:
            chunks = _chunks(documents, encoding, _num_workers(options, documents), stack)
            reading = stack.enter_context(Reading(console, documents, shards.progress.all_tokens))
            for chunk in reading.shown(chunks):
                shards.add(chunk)
        written = shards.finish()
    looks.say_how_many()
    console.print(_said(options, encoding, written, documents))


def _is_token_file(path: Path) -> bool:
    """Whether a file is one of ours; what cannot be read is said by who reads it."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class _Looks:
    """Warns of files that do not look like text: of the first ones when they are read, at the end of how many."""

    def __init__(self, console: SafeConsole) -> None:
        self._console, self._number = console, 0

    def at(self, path: Path, head: bytes) -> None:
        """Look at the first bytes of a file.

        Raises:
            ValueError: it is a token file.
        """
        if head.startswith(MAGIC):
            raise ValueError(
                f"a text must not be a token file: {path} is one already: train on it with --data.path {path}, or "
                "leave it out with --pattern"
            )
        reason = why_no_text(head)
        self._number += bool(reason)
        if reason and self._number <= _MOST_WARNINGS:
            self._console.print(
                f"warning: {path} does not look like text: {reason}: if it is none, stop, and leave it out with "
                "--pattern"
            )

    def say_how_many(self) -> None:
        """Say how many there were, where not each was said."""
        if self._number > _MOST_WARNINGS:
            self._console.print(f"warning: {self._number:,} files do not look like text: leave them out with --pattern")


def encoding_of(directory: str, begin: str | None = None, end: str | None = None) -> Encoding:
    """Return how documents become ids: by the tokenizer in a directory, or as bytes; marks as WriteOptions has them.

    Raises:
        ValueError: no tokenizer, or one without such a mark.
    """
    asked = {name: mark for name, mark in (("begin", begin), ("end", end)) if mark is not None}
    if directory == BYTES:
        return Encoding(None, {name: _byte(name, mark) for name, mark in asked.items()}, BYTE_VOCAB_SIZE, "", None)
    tokenizer = TextTokenizer(Path(directory))
    marks = {name: tokenizer.mark(name, mark) for name, mark in asked.items()}
    vocab_size, of_model = tokenizer.vocab_size, tokenizer.model_vocab_size()
    if of_model is None:
        return Encoding(tokenizer, marks, vocab_size, f" --model.vocab-size {vocab_size}", None)
    return Encoding(tokenizer, marks, min(vocab_size, of_model), f" --model.path {directory}", of_model)


def _chunks(documents: DocumentReader, encoding: Encoding, num_workers: int, stack: ExitStack) -> Iterator[TokenChunk]:
    begin, end, tokenizer = encoding.marks.get("begin"), encoding.marks.get("end"), encoding.tokenizer
    if tokenizer is None:
        return bytes_of(documents, begin, end)
    encode = stack.enter_context(Pool(tokenizer, num_workers)).encode if num_workers > 1 else None
    chunks = tokens_of(documents, tokenizer, begin, end, encode)
    return chunks if encoding.of_model is None else _below(encoding.of_model, chunks, tokenizer)


def _num_workers(options: WriteOptions, documents: DocumentReader) -> int:
    """As many as were asked for; else as many as there are cores, fewer for a short text."""
    if options.workers is not None:
        return options.workers
    num_cores = len(os.sched_getaffinity(0))
    if documents.paths == [PIPE]:
        return num_cores
    left = documents.num_bytes - documents.num_read_bytes
    return max(1, min(num_cores, left // _LEAST_BYTES_PER_WORKER))


def _asked(options: WriteOptions, encoding: Encoding, about: About) -> str:
    """Return what decides the bytes, but for the text: a call goes on only where this is the same."""
    values = [options.field, about, encoding.vocab_size, options.shard_tokens]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _sources(paths: Sequence[Path]) -> list[str]:
    """Return what identifies each file as it is now, without reading it."""
    found = []
    for path in paths:
        status = None if path == PIPE else path.stat()
        found.append(str(path) if status is None else f"{path} {status.st_size} {status.st_mtime_ns}")
    return found


def _said(options: WriteOptions, encoding: Encoding, written: WriteProgress, documents: DocumentReader) -> str:
    """Say what was written."""
    left_out = [f"{documents.num_empty:,} empty"] if documents.num_empty else []
    left_out += [f"{written.num_short:,} of fewer than 2 tokens"] if written.num_short else []
    without = f" ({', '.join(left_out)} left out)" if left_out else ""
    marked = "".join(f", each {name}s with {number}" for name, number in encoding.marks.items())
    shards = "" if options.shard_tokens is None else f" in {written.shard:,} files"
    size = f"{written.all_tokens:,} tokens of {written.all_documents:,} documents{shards}"
    use = f"--data.path {options.out}{encoding.model}"
    return f"{options.out}: {size}{without}{marked}, vocabulary {encoding.vocab_size}; train on it with {use}"


def _below(of_model: int, chunks: Iterator[TokenChunk], tokenizer: TextTokenizer) -> Iterator[TokenChunk]:
    """Yield the chunks; refuse an id that the model beside the tokenizer does not have.

    A tokenizer may have such ids and never give them for a text, as that of Gemma 3 1B has one for pictures.
    """
    for chunk in chunks:
        largest = int(chunk.ids.max(initial=0))
        if largest >= of_model:
            raise ValueError(
                f"a tokenizer's ids must be below the vocabulary of its model: {tokenizer.directory} gives "
                f"{tokenizer.decode([largest])!r} the id {largest}, and its config.json has vocab_size {of_model}: "
                "copy the tokenizer of this model, or leave out such texts and marks"
            )
        yield chunk


def _byte(name: str, asked: str) -> int:
    """Return the byte that --begin or --end asks for."""
    if not asked.isdecimal() or int(asked) >= BYTE_VOCAB_SIZE:
        raise ValueError(
            f"--{name} must be a byte where tokens are bytes: got {asked or 'nothing'!r}: use a number below "
            f"{BYTE_VOCAB_SIZE}, such as --{name} 10 for a new line"
        )
    return int(asked)


class Reading:
    """Show how much of the documents has been read: a line that updates in place, or plain lines; a context manager.

    Args:
        console: where to.
        documents: that are read.
        num_tokens: that are written already.
    """

    def __init__(self, console: SafeConsole, documents: DocumentReader, num_tokens: int = 0) -> None:
        self._console, self._documents = console, documents
        self._num_tokens, self._num_lines = num_tokens, 0
        columns = (BarColumn(), TextColumn("{task.fields[figures]}"), TextColumn("left"), TimeRemainingColumn())
        self._progress = console.progress(*columns)
        self._task = self._progress.add_task("read", total=documents.num_bytes or None, figures="")

    def __enter__(self) -> Reading:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def shown(self, chunks: Iterator[_Ids]) -> Iterator[_Ids]:
        """Yield the chunks, and show after each how far it is."""
        documents = self._documents
        for chunk in chunks:
            yield chunk
            self._num_tokens += chunk.ids.size
            share = documents.num_read_bytes / documents.num_bytes if documents.num_bytes else 0.0
            of_all = f" of {documents.num_bytes / 1e6:,.1f}" if documents.num_bytes else ""
            figures = f"{documents.num_read_bytes / 1e6:,.1f}{of_all} MB"
            figures += f", {self._num_tokens:,} tokens"
            self._progress.update(self._task, completed=documents.num_read_bytes, figures=figures)
            if not self._console.is_terminal and share < 1 and int(share * _PLAIN_LINES) > self._num_lines:
                self._num_lines = int(share * _PLAIN_LINES)
                self._console.print(f"read {figures}")
