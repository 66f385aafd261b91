"""`tpengine data`: text files become a token file. No torch.

The file is written beside its place and renamed when it is whole; an interrupted command leaves none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tpengine.data import write_tokens
from tpengine.data.files.one_file import About
from tpengine.data.text.documents import Documents
from tpengine.data.text.encode import BYTE_VOCAB_SIZE, Lengths, bytes_of, tokens_of
from tpengine.data.text.sources import find_files
from tpengine.data.text.tokenizer import TextTokenizer

BYTES = "bytes"

# Where the output is no terminal.
_PLAIN_LINES = 20


@dataclass(frozen=True)
class Options:
    """What `tpengine data` was asked for.

    Attributes:
        sources: files, and directories to look in.
        pattern: which files of a directory.
        field: of a line of JSONL, has the text.
        tokenizer: the directory of a tokenizer, or "bytes".
        begin, end: what each document begins or ends with: an id, a token as it is written, or empty for the one that
            the tokenizer declares; None for nothing.
        out: the token file.
    """

    sources: Sequence[Path]
    pattern: str
    field: str
    tokenizer: str
    begin: str | None
    end: str | None
    out: Path


def write_data(options: Options) -> None:
    """Write a token file, and say what is in it.

    Raises:
        ValueError: a mistake of the user, in one line.
    """
    paths = find_files(options.sources, options.pattern, options.out)
    marks = {name: asked for name, asked in (("begin", options.begin), ("end", options.end)) if asked is not None}
    documents, lengths, about = Documents(paths, options.field), Lengths(), About()
    if options.tokenizer == BYTES:
        ids = {name: _byte(name, asked) for name, asked in marks.items()}
        vocab_size, arrays = BYTE_VOCAB_SIZE, bytes_of(documents, ids.get("begin"), ids.get("end"), lengths)
        model = ""
    else:
        tokenizer = TextTokenizer(Path(options.tokenizer))
        ids = {name: tokenizer.mark(name, asked) for name, asked in marks.items()}
        vocab_size = tokenizer.vocab_size
        about = About(tokenizer=tokenizer.directory.resolve().name, tokenizer_sha256=tokenizer.sha256())
        arrays = tokens_of(documents, tokenizer, ids.get("begin"), ids.get("end"), lengths)
        model = f" --model.vocab-size {vocab_size}"
        if (of_model := tokenizer.model_vocab_size()) is not None:
            vocab_size, model = min(vocab_size, of_model), f" --model.path {options.tokenizer}"
            arrays = _below(of_model, arrays, tokenizer)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    with Reading(console, documents) as reading:
        about = about._replace(begin=ids.get("begin"), end=ids.get("end"))
        shown = reading.shown(arrays)
        num_tokens = write_tokens(options.out, shown, vocab_size, replaces=False, lengths=lambda: lengths, about=about)
    empty = f" ({documents.num_empty:,} empty left out)" if documents.num_empty else ""
    marked = "".join(f", each {name}s with {number}" for name, number in ids.items())
    console.print(
        f"{options.out}: {num_tokens:,} tokens of {documents.num_documents:,} documents{empty}{marked}, vocabulary "
        f"{vocab_size}; train on it with --data.path {options.out}{model}"
    )


def _below(of_model: int, arrays: Iterable[NDArray[Any]], tokenizer: TextTokenizer) -> Iterator[NDArray[Any]]:
    """Yield the arrays; refuse an id that the model beside the tokenizer does not have.

    A tokenizer may have such ids and never give them for a text, as that of Gemma 3 1B has one for pictures.
    """
    for array in arrays:
        largest = int(array.max(initial=0))
        if largest >= of_model:
            raise ValueError(
                f"a tokenizer's ids must be below the vocabulary of its model: {tokenizer.directory} gives "
                f"{tokenizer.decode([largest])!r} the id {largest}, and its config.json has vocab_size {of_model}: "
                "copy the tokenizer of this model, or leave out such texts and marks"
            )
        yield array


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
    """

    def __init__(self, console: Console, documents: Documents) -> None:
        self._console, self._documents = console, documents
        self._num_tokens, self._num_lines = 0, 0
        columns = (BarColumn(), TextColumn("{task.fields[figures]}"), TextColumn("left"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("read", total=documents.num_bytes, figures="")

    def __enter__(self) -> Reading:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def shown(self, arrays: Iterator[NDArray[Any]]) -> Iterator[NDArray[Any]]:
        """Yield the arrays, and show after each how far it is."""
        documents = self._documents
        for array in arrays:
            yield array
            self._num_tokens += array.size
            share = documents.num_read_bytes / documents.num_bytes
            figures = f"{documents.num_read_bytes / 1e6:,.1f} of {documents.num_bytes / 1e6:,.1f} MB"
            figures += f", {self._num_tokens:,} tokens"
            self._progress.update(self._task, completed=documents.num_read_bytes, figures=figures)
            if not self._console.is_terminal and share < 1 and int(share * _PLAIN_LINES) > self._num_lines:
                self._num_lines = int(share * _PLAIN_LINES)
                self._console.print(f"read {figures}")
