"""`tpengine data --fit`: put the documents of token files into samples, for --data.packing fit. No torch."""

from __future__ import annotations

from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tpengine.config.settings import DEFAULT_SHARE_HELD_OUT
from tpengine.data.fit_index import identity_of, index_path, made_of, open_index
from tpengine.data.fitting import write_index
from tpengine.data.source import open_text
from tpengine.data.source_files import DocumentSourceTokens
from tpengine.data.stored_tokens import DocumentTokens
from tpengine.data.text_corpus import num_trained_on
from tpengine.data.token_file import TokenFile
from tpengine.observe.safe_console import SafeConsole

_MOST_FRACTION = 0.9
# Of a sample: a piece's length has 32 bits.
_MOST_TOKENS = 2**24


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
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
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
