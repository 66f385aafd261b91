"""A text, opened: its tokens with the hash of their content, what identifies them, and the files they are read from.

What is trained on and what is held out of it is decided in text_corpus.py; a text may also be held out as a whole
(text_corpus.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tpengine.checkpoint.fingerprint import of_files
from tpengine.config import Config
from tpengine.data.columns import Column, OpenedColumn, columns_of, open_columns
from tpengine.data.content import content_sha256, forget_on_host, note_sha256, noted_sha256, once_per_host
from tpengine.data.fit_index import FitIndex, first_file
from tpengine.data.samples import HasDocuments
from tpengine.data.source import open_file
from tpengine.data.source import open_text as open_files
from tpengine.data.source_files import SourceTokens
from tpengine.data.stored_tokens import StoredTokens
from tpengine.data.text_files import stdlib_text
from tpengine.data.token_file import TextTokens, TokenFile
from tpengine.training.samples import WEIGHTS

# A file system slower than this is treated as broken.
_LEAST_BYTES_PER_S = 10e6
# Half of a SHA-256 is enough to distinguish texts, and is short enough for a message.
_SHOWN_DIGITS = 32


@dataclass(frozen=True)
class OpenedText:
    """A text that a run reads.

    Attributes:
        path: as the user named it.
        file: its tokens, with the SHA-256 of their content.
        is_noted: whether the next run finds that hash without reading the text.
        reading_seconds: how much longer than this rank a rank of another host may take to open the text, since it may
            have to read all of it; 0 if the header has the hash.
        opened_columns: those that are read with its tokens.
    """

    path: str
    file: TokenFile
    is_noted: bool
    reading_seconds: float
    opened_columns: tuple[OpenedColumn, ...] = ()

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns that are read with its tokens, as they are handed out: weights as float32."""
        columns = (opened.column for opened in self.opened_columns)
        return tuple(Column(WEIGHTS) if column.name == WEIGHTS else column for column in columns)

    @property
    def files_of_columns(self) -> tuple[TokenFile, ...]:
        """What the columns contain, to be checked while training goes on: values, and the SHA-256 they must have."""
        each = (of_file for opened in self.opened_columns for of_file in opened.values)
        return tuple(TokenFile(values, 0, sha256) for values, sha256 in each)

    @property
    def tokens(self) -> TextTokens:
        """All tokens."""
        return self.file.tokens

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that it is read from; none of a text in memory."""
        tokens = self.tokens
        if isinstance(tokens, SourceTokens):
            return tuple(file.path.resolve() for file in tokens.files)
        return (tokens.file.path.resolve(),) if isinstance(tokens, StoredTokens) else ()

    @property
    def contents(self) -> dict[str, str]:
        """What the content of each file is known by, and where that is."""
        tokens = self.tokens
        if isinstance(tokens, SourceTokens):
            return {file.sha256 or file.fingerprint: str(file.path) for file in tokens.files}
        return {self.file.sha256: self.path}

    def fingerprint(self, fit: FitIndex | None) -> str:
        """Return what identifies it: number, dtype and vocabulary of the tokens, and their hash; or each file's.

        Args: fit: the index of its fitted samples; None for none.
        """
        tokens, vocab_size, sha256, about, _ = self.file
        columns = {opened.column.name: opened.fingerprint for opened in self.opened_columns}
        index = "" if fit is None else f"SHA-256 {fit.sha256[:_SHOWN_DIGITS]}"
        if isinstance(tokens, SourceTokens) and len(tokens.files) > 1:
            lines = {
                str(file.path): f"{len(file.tokens)} {file.tokens.dtype} tokens, SHA-256 "
                f"{file.fingerprint[:_SHOWN_DIGITS]}"
                for file in tokens.files
            }
            return of_files(lines, index, columns)
        documents = "" if about is None else f", documents' SHA-256 {about.starts_sha256[:_SHOWN_DIGITS]}"
        line = f"{len(tokens)} {tokens.dtype} tokens below {vocab_size}, SHA-256 {sha256[:_SHOWN_DIGITS]}{documents}"
        return of_files({str(first_file(self.file)): line}, index, columns) if index or columns else line

    def hashed(self, run_dir: str, say: Callable[[str], None]) -> OpenedText:
        """Return it with its hash: from the header, from an earlier run's note, or computed now and noted.

        Args: run_dir: may have a note; empty for none. say: called before the text is read completely.
        Raises: ValueError: the text changes while it is read, or cannot be read.
        """
        file, is_noted = _with_hash(self.file, run_dir, say)
        return replace(self, file=file, is_noted=is_noted)

    def note_hash(self, run_dir: Path) -> None:
        """Write the hash to the run directory if no note can be written in the text's own directory."""
        if not self.is_noted and isinstance(self.tokens, StoredTokens):
            note_sha256(self.tokens, self.file.sha256, run_dir)

    def check_documents(self, packing: str) -> None:
        """Raise ValueError if a packing needs to know where documents begin and the text does not."""
        if packing == "cut" or isinstance(self.tokens, HasDocuments):
            return
        where = self.path
        if isinstance(self.tokens, SourceTokens):
            where = str(next(file.path for file in self.tokens.files if file.starts is None))
        raise ValueError(
            f"--data.packing {packing} needs to know where documents begin: {where} does not say: write it again "
            "with tpengine data, or use --data.packing cut"
        )


def open_text(path: str, config: Config, say: Callable[[str], None] = lambda _: None) -> OpenedText:
    """Open a text of a run, whose vocabulary is at most the model's.

    Args:
        path: as data.path names texts.
        config: validated; model and data.packing are used.
        say: is called if files of others are not hashed at all.

    Returns: the text, without its hash if its header has none: what is wrong with it is said before all of it is read.

    Raises: ValueError: an unreadable or damaged token file, a vocabulary larger than the model's, a text that does not
        know its documents where they are packed.
    """
    vocab_size = config.model.vocab_size
    text = _stdlib_tokens() if path == "stdlib" else open_files(path)
    files = text.tokens.files if isinstance(text.tokens, SourceTokens) else ()
    if text.vocab_size > vocab_size:
        remedy = f"use model.vocab_size {text.vocab_size}"
        if config.model.path:
            remedy = f"write the text with the model's tokenizer, tpengine data --tokenizer {config.model.path}"
        where = next((file.path for file in files if file.vocab_size == text.vocab_size), path)
        raise ValueError(
            f"the model's vocabulary must cover the text's: model.vocab_size {vocab_size}, {where} {text.vocab_size}: "
            f"{remedy}"
        )
    unhashed = sum(not file.sha256 for file in files)
    if unhashed:
        say(
            f"{unhashed:,} of the {len(files):,} files of {path} have no hash of their content: they are known by "
            "their sizes and pieces of what is in them, both ends among these"
        )
    num_bytes = 0 if text.sha256 else len(text.tokens) * text.tokens.dtype.itemsize
    columns = _columns(text, path, config.data.columns, say)
    opened = OpenedText(path, text, True, num_bytes / _LEAST_BYTES_PER_S, columns)
    opened.check_documents(config.data.packing)
    return opened


def _columns(text: TokenFile, path: str, asked: str, say: Callable[[str], None]) -> tuple[OpenedColumn, ...]:
    """Open the columns of a text that a run reads; its tokens know them then."""
    tokens = text.tokens
    if isinstance(tokens, SourceTokens):
        files = tuple(tokens.files)
    elif isinstance(tokens, StoredTokens):
        files = (open_file(tokens.file.path)._replace(tokens=tokens),)
    else:
        files = ()
    names = columns_of(asked, files)
    if names and not files:
        raise ValueError(
            f"columns lie beside token files: data.columns is {asked!r} and data.path {path} is none: use a token file"
        )
    if WEIGHTS in names:
        say(f"{path} has weights: each target's loss is multiplied by its own (--data.columns no-weights leaves them)")
    return open_columns(files, names)


def _stdlib_tokens() -> TokenFile:
    """The standard text; its vocabulary ends at the largest byte in it, since UTF-8 does not use the highest ones."""
    text = stdlib_text()
    return TokenFile(text, int(text.max()) + 1, hashlib.sha256(text.tobytes()).hexdigest())


def _with_hash(text: TokenFile, run_dir: str, say: Callable[[str], None]) -> tuple[TokenFile, bool]:
    """Return the text with its hash: from the header, from an earlier run's note, or computed now and noted.

    Returns: the text; whether the next run finds the hash.
    """
    tokens = text.tokens
    if text.sha256 or not isinstance(tokens, StoredTokens):
        return text, True
    path = tokens.file.path
    places = [path.parent, *([Path(run_dir)] if run_dir else [])]
    noted = noted_sha256(tokens, places)
    if noted:
        return text._replace(sha256=noted), True
    identity = tokens.file.identity()
    say(f"{path} was written without a hash of its content: reading its {identity.size / 1e6:,.0f} MB once to make one")

    def check_unchanged() -> None:
        if tokens.file.identity() != identity:
            raise ValueError(
                f"a token file must not change while it is read: {path}: wait until it is written, then start again"
            )

    def make() -> str:
        # Since this rank looked, another may have made the hash, noted it, and removed its temporary file.
        made = noted_sha256(tokens, places) or content_sha256(tokens)
        check_unchanged()
        return made

    sha256 = once_per_host(tokens, make)
    check_unchanged()
    is_noted = any(note_sha256(tokens, sha256, place) for place in places)
    if is_noted:
        forget_on_host(tokens)
    return text._replace(sha256=sha256), is_noted
