"""`tpengine data --check` and `--fit`: read token files, say what is wrong with them, or fit their documents. No torch.

--check reads everything once: whether files, and indices of fitted samples, hold what they say. --fit puts documents
into samples of one length, for --data.packing fit.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from tpengine.config.settings import DEFAULT_SHARE_HELD_OUT
from tpengine.data import open_source
from tpengine.data.columns import column_path, columns_beside, open_column
from tpengine.data.content import content_sha256
from tpengine.data.fit_index import FitIndex, fit_command, identity_of, index_path, indices_of, made_of, open_index
from tpengine.data.fitting import is_fitted, write_index
from tpengine.data.source import open_text
from tpengine.data.source_files import DocumentSourceTokens, SourceFile
from tpengine.data.stored_tokens import DocumentTokens
from tpengine.data.text_corpus import num_trained_on
from tpengine.data.token_file import TokenFile
from tpengine.observe.safe_console import SafeConsole
from tpengine.tokenizer import TextTokenizer

_TOKENS_AT_ONCE = 1 << 20
_STARTS_AT_ONCE = 1 << 16
_LEAST_TOKENS = 2
_MOST_FRACTION = 0.9
# Of a sample: a piece's length has 32 bits.
_MOST_TOKENS = 2**24


@dataclass
class _Found:
    """What reading a file has shown.

    Attributes:
        sha256: of the tokens.
        starts_sha256: of the list of documents, as our own files have it.
        largest: the largest id, and beyond: the first id that is not below the vocabulary, with its place.
        num_short: documents of fewer than 2 tokens.
        begins, ends: how many documents begin and end with the id that was looked for.
    """

    sha256: str = ""
    starts_sha256: str = ""
    largest: int = 0
    beyond: tuple[int, int] | None = None
    num_short: int = 0
    begins: int = 0
    ends: int = 0


def check_data(path: str, tokenizer: str = "bytes") -> None:
    """Read token files and say of each what it holds, and what is wrong.

    Args:
        path: as --data.path names them.
        tokenizer: the directory of the tokenizer that made them, for its vocabulary and the ids that it declares for
            begin and end; or "bytes" for none.

    Raises:
        ValueError: a file is not what it says, in one line; those of other files are printed before.
    """
    source = open_source(path)
    console = SafeConsole(soft_wrap=True)
    used = None if tokenizer == "bytes" else TextTokenizer(Path(tokenizer))
    faults = []
    for file in source.files:
        of_file = _faults(file, used, console)
        for fault in of_file:
            console.print(f"{file.path}: {fault}")
        faults += [f"{file.path}: {fault}" for fault in of_file]
    if faults:
        raise ValueError(f"token files must hold what they say: {faults[0]}: write or copy them again")
    faults = _faults_of_indices(path, console)
    if faults:
        raise ValueError(f"a fit index must hold what fitting gives: {faults[0]}")
    documents = "" if source.num_documents is None else f" of {source.num_documents:,} documents"
    console.print(f"{path}: {len(source.files):,} files, {source.num_tokens:,} tokens{documents}: all as they say")


def _faults(file: SourceFile, tokenizer: TextTokenizer | None, console: SafeConsole) -> list[str]:
    """Read a file; say what is in it; return what is wrong."""
    about, faults = file.about, []
    vocab_size = file.vocab_size or (0 if tokenizer is None else tokenizer.vocab_size)
    if tokenizer is not None and about.tokenizer_sha256 not in ("", tokenizer.sha256()):
        faults.append(f"was written with another tokenizer than {tokenizer.directory} (SHA-256 of tokenizer.json)")
        tokenizer = None
    declared = {} if tokenizer is None else tokenizer.declared_marks()
    begin, end = declared.get("begin", about.begin), declared.get("end", about.end)
    try:
        found = _read(file, vocab_size, begin, end)
    except ValueError as error:
        return [*faults, str(error)]
    if file.sha256 and found.sha256 != file.sha256:
        faults.append(f"its tokens have SHA-256 {found.sha256[:16]}..., its header says {file.sha256[:16]}...")
    if about.starts_sha256 and found.starts_sha256 != about.starts_sha256:
        faults.append("its list of documents does not have the SHA-256 of its header")
    if found.beyond is not None:
        faults.append(f"id {found.beyond[0]} at token {found.beyond[1]} is not below the vocabulary, {vocab_size}")
    if file.sha256 and file.starts is not None and found.largest != about.largest:
        faults.append(f"its largest id is {found.largest}, its header says {about.largest}")
    hashed = "SHA-256 right" if file.sha256 and not faults else "no hash to check" if not file.sha256 else "damaged"
    documents = "" if file.starts is None else f" of {len(file.starts):,} documents"
    short = f", {found.num_short:,} of fewer than 2 tokens" if found.num_short else ""
    console.print(
        f"{file.path}: {file.format}, {len(file.tokens):,} {file.tokens.dtype} tokens{documents}{short}, largest id "
        f"{found.largest}, {hashed}"
    )
    if file.starts is not None:
        for name, mark, number in (("begin", begin, found.begins), ("end", end, found.ends)):
            if mark is None or number:
                continue
            who = "the tokenizer declares" if name in declared else "its header says"
            console.print(f"warning: {file.path}: no document {name}s with {mark}, which {who} for that")
    return faults + _faults_of_columns(file, console)


def _faults_of_columns(file: SourceFile, console: SafeConsole) -> list[str]:
    """Read the columns beside a file, and those that it was written with; say what they are; return what is wrong."""
    faults = []
    for name in sorted({*columns_beside(file.path), *file.tokens.written_with}):
        try:
            column, values, sha256 = open_column(file, name)
            if content_sha256(values) != sha256:
                raise ValueError(f"values of {name} have SHA-256 other than the header of {name} says")
        except ValueError as error:
            faults.append(str(error))
            continue
        what = f"{len(values):,} x {column.width} {column.dtype}"
        console.print(f"{column_path(file.path, name)}: {what}, SHA-256 right")
    return faults


def _faults_of_indices(path: str, console: SafeConsole) -> list[str]:
    """Read the indices of fitted samples that lie beside a text; say what they are; return what is wrong.

    A hash says that an index is as it was written; that it is what fitting gives shows only when it is fitted again.
    """
    text, faults = open_text(path), []
    for place, seq_len in indices_of(text):
        try:
            index = open_index(text, path, seq_len)
        except ValueError as error:
            # A run would refuse it with the same words; the tokens are what they say nevertheless.
            console.print(f"warning: {error}")
            continue
        fault = _fault_of_index(index, text)
        if fault:
            console.print(f"{place}: {fault}")
            faults.append(f"{place}: {fault}: write it again with {fit_command(path, seq_len)}")
            continue
        samples = index.train.num_samples + index.held_out.num_samples
        console.print(f"{place}: {samples:,} fitted samples of {seq_len:,} tokens, SHA-256 and samples right")
    return faults


def _fault_of_index(index: FitIndex, text: TokenFile) -> str:
    """Return what is wrong with an index that is of a text, or nothing."""
    if content_sha256(index.content) != index.sha256:
        return "its content does not have the SHA-256 of its header"
    tokens = text.tokens
    if not isinstance(tokens, DocumentTokens | DocumentSourceTokens):
        return "its text does not know where documents begin"
    return "" if is_fitted(index, tokens.starts) else "its samples are not those that fitting gives"


def _read(file: SourceFile, vocab_size: int, begin: int | None, end: int | None) -> _Found:
    """Read all tokens, and all documents.

    Raises:
        ValueError: it cannot be read; documents that are not one behind the other.
    """
    found, digest = _Found(), hashlib.sha256()
    for first in range(0, len(file.tokens), _TOKENS_AT_ONCE):
        ids = file.tokens[first : first + _TOKENS_AT_ONCE]
        digest.update(ids.data)
        found.largest = max(found.largest, int(ids.max()))
        if vocab_size and found.beyond is None and found.largest >= vocab_size:
            place = int(np.argmax(ids >= vocab_size))
            found.beyond = int(ids[place]), first + place
    found.sha256 = digest.hexdigest()
    if file.starts is not None:
        _read_documents(file, found, begin, end)
    return found


def _read_documents(file: SourceFile, found: _Found, begin: int | None, end: int | None) -> None:
    starts, digest, tokens = file.starts, hashlib.sha256(), file.tokens
    assert starts is not None
    for first in range(0, len(starts), _STARTS_AT_ONCE):
        some = starts[first : first + _STARTS_AT_ONCE + 1]
        starts.check_ascending(some, first)
        is_last = first + _STARTS_AT_ONCE >= len(starts)
        digest.update(some[:_STARTS_AT_ONCE].astype("<u8").tobytes())
        if is_last:
            some = np.append(some[:_STARTS_AT_ONCE], len(tokens))
        if some[0] < 0 or some[-1] > len(tokens):
            raise ValueError(
                f"documents must be within its {len(tokens)} tokens: one begins at {some[0]} or {some[-1]}"
            )
        found.num_short += int((np.diff(some) < _LEAST_TOKENS).sum())
        found.begins += _count(file, some[:-1][np.diff(some) > 0], begin)
        found.ends += _count(file, some[1:][np.diff(some) > 0] - 1, end)
    found.starts_sha256 = digest.hexdigest()


def _count(file: SourceFile, places: np.ndarray[tuple[int], np.dtype[np.int64]], mark: int | None) -> int:
    """Return how many of the tokens at some places, which ascend, are a mark."""
    if mark is None or not len(places):
        return 0
    number = 0
    for first in range(0, len(places), _STARTS_AT_ONCE):
        some = places[first : first + _STARTS_AT_ONCE]
        low = 0
        while low < len(some):
            high = int(np.searchsorted(some, some[low] + _TOKENS_AT_ONCE))
            ids = file.tokens[int(some[low]) : int(some[high - 1]) + 1]
            number += int((ids[some[low:high] - some[low]] == mark).sum())
            low = high
    return number


def fit_data(path: str, length: str, held_out_fraction: float | None = None) -> None:
    """Write the index beside the text, and say how much of its samples is padding.

    Args:
        path: as --data.path names it.
        length: tokens of a sample, train.seq_len of the run.
        held_out_fraction: as data.held_out_fraction; None for its default.

    Raises: ValueError: one line: another length or fraction, a text that does not know its documents, or no place.
    """
    fraction = DEFAULT_SHARE_HELD_OUT if held_out_fraction is None else held_out_fraction
    if not length.isdecimal() or not 1 <= int(length) <= _MOST_TOKENS:
        raise ValueError(f"--fit needs the tokens of a sample, 1 to {_MOST_TOKENS}: got {length!r}: use train.seq_len")
    if not 0 <= fraction <= _MOST_FRACTION:
        raise ValueError(
            f"--held-out-fraction must be 0 to {_MOST_FRACTION}: got {fraction}: use data.held_out_fraction"
        )
    seq_len, text = int(length), open_text(path)
    tokens = text.tokens
    if not isinstance(tokens, DocumentTokens | DocumentSourceTokens):
        raise ValueError(
            f"--fit needs to know where documents begin: {path} does not say: write it again with tpengine data"
        )
    num_train, place = num_trained_on(tokens, fraction), index_path(text, seq_len)
    replaced = _replaced(place, path, text, num_train)
    console = SafeConsole(soft_wrap=True)
    columns = (BarColumn(), TextColumn("{task.percentage:.0f} %"), TextColumn("left"), TimeRemainingColumn())
    with console.progress(*columns) as progress:
        task = progress.add_task("fit", total=len(tokens))
        try:
            found = write_index(
                place, text, tokens.starts, seq_len, num_train, lambda done: progress.update(task, completed=done)
            )
        except OSError as error:
            raise ValueError(
                f"a fit index is written beside its text: {place}: {error.strerror}: make that possible, or copy the "
                "text to another directory"
            ) from None
    if replaced:
        console.print(replaced)
    index = open_index(text, path, seq_len, num_train)
    held_out = f" and {found.num_samples[1]:,} held out" if found.num_samples[1] else ""
    padding = 1 - len(tokens) / (sum(found.num_samples) * seq_len)
    console.print(
        f"{index.path}: {found.num_samples[0]:,} samples of {seq_len:,} tokens{held_out}, of {found.num_documents:,} "
        f"documents, {found.num_cut:,} of them longer and cut, {padding:.2%} padding; train on it with --data.path "
        f"{path} --data.packing fit --train.seq-len {seq_len}"
    )


def _replaced(place: Path, path: str, text: TokenFile, num_train: int) -> str:
    """Return in a line which index of something else is about to be replaced, or nothing.

    An index has the name of the first file alone: that of a directory, and that of its first file, are at one place.
    """
    before, num_tokens = made_of(place), len(text.tokens)
    if before is None:
        return ""
    if before.identity != identity_of(text) or before.num_tokens != num_tokens:
        return (
            f"{place}: an index of other data was here, of {before.num_tokens:,} tokens, {path} has {num_tokens:,}: it "
            "is replaced"
        )
    if before.num_train != num_train:
        return (
            f"{place}: an index of another held-out part was here, with {num_tokens - before.num_train:,} tokens held "
            f"out, now {num_tokens - num_train:,}: it is replaced"
        )
    return ""
