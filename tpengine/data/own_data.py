"""Data of a user's own, which `tpengine.run(data=...)` takes in the place of token files. No torch.

Two forms, told apart by what they are:

    tokens[N]                integers in one row, an array, a tensor on the host or a list: a text, read as a file is
    len(data), data[i]       samples: data[i] is integers[n], 2 <= n <= seq_len + 1, of which the first n - 1 are
                             tokens and the last n - 1 are labels; the rest of a short sample is padding

The order of samples is that of files: a function of (seed, number of the sample), the same in every layout and after
every restart. So data[i] must be the same sample whenever it is asked for, on every rank. What is held out is the end,
data.held_out_fraction of it.

A resumed run refuses other data. Tokens are known by their SHA-256, as those of a file are. Samples are known by what
their `fingerprint()` returns, a text, if they have that method; otherwise by their number and the SHA-256 of some of
them, since reading all of them may take as long as the run does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tpengine.config import IGNORED_LABEL, Config, DataConfig
from tpengine.data.opened_text import OpenedText
from tpengine.data.samples import Samples
from tpengine.data.text_corpus import TextCorpus, corpus_of
from tpengine.data.token_file import SupportsArray, TokenFile, check_tokens, dtype_for
from tpengine.training.samples import PackedBatch

_NAME = "tpengine.run(data=...)"
_PADDING = 0
# Samples whose hash stands for all of them, evenly spaced, both ends among them.
_MOST_HASHED = 64
_SHOWN_DIGITS = 32


@runtime_checkable
class OwnSamples(Protocol):
    """Samples of a user's own, as torch's map-style data sets are. They are read in a thread, several steps ahead."""

    def __len__(self) -> int:
        """Return how many there are."""

    def __getitem__(self, number: int, /) -> Any:
        """Return a sample: integers[n], 2 <= n <= seq_len + 1, an array, a tensor on the host or a list."""


@dataclass(frozen=True)
class _ReadSamples(Samples):
    """Samples that a user's object returns, in our order; `tokens` is empty.

    Attributes:
        own: the object.
        numbers: of its samples, those of this part.
    """

    own: OwnSamples = field(kw_only=True)
    numbers: range = field(kw_only=True)

    @property
    def num_windows(self) -> int:
        """The number of samples."""
        return len(self.numbers)

    def read_with_starts(self, samples: NDArray[np.int64]) -> PackedBatch:
        """See Samples.read_with_starts; what is behind a short sample is padding, whose labels do not count."""
        tokens = np.full((len(samples), self.seq_len), _PADDING, dtype=np.int64)
        labels = np.full_like(tokens, IGNORED_LABEL)
        for row, place in enumerate(self._windows(samples)):
            found = self.one(self.numbers[place])
            tokens[row, : len(found) - 1], labels[row, : len(found) - 1] = found[:-1], found[1:]
        if self.ignore_token is not None:
            labels[labels == self.ignore_token] = IGNORED_LABEL
        return tokens, labels, []

    def one(self, number: int) -> NDArray[np.int64]:
        """Read a sample by the user's number: int64 [n].

        Raises:
            ValueError: it cannot be read, or is no such sample; one line.
        """
        what = f"data[{number}]"
        try:
            found = np.asarray(self.own[number])
        except Exception as error:
            raise ValueError(
                f"every sample must be readable: {what} fails: {type(error).__name__}: {error}: correct it, or leave "
                "that sample out"
            ) from error
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise ValueError(
                f"a sample must be integers in one row: {what} is {found.dtype} {list(found.shape)}: return its tokens"
            )
        if not 2 <= len(found) <= self.seq_len + 1:
            raise ValueError(
                f"a sample must have 2 to seq_len + 1 tokens, as a label is the next token: {what} has {len(found)}, "
                f"train.seq_len {self.seq_len}: cut it, or use train.seq_len {max(1, len(found) - 1)}"
            )
        _check_below(found, self.vocab_size, what)
        return found.astype(np.int64)


@dataclass(frozen=True)
class OwnCorpus:
    """Samples of a user's own, of which the last ones are held out; see Corpus.

    Attributes:
        train, held_out: the parts, the first in shuffled order.
        identity: what a resumed run compares.
    """

    train: _ReadSamples
    held_out: _ReadSamples
    identity: str
    texts: tuple[TokenFile, ...] = ()
    reading_seconds: float = 0.0

    def fingerprint(self) -> str:
        """See Corpus."""
        return self.identity

    def fingerprint_of_ends(self) -> str:
        """See Corpus; no older checkpoint has trained on such data."""
        return ""

    def padding(self) -> Mapping[str, float]:
        """See Corpus; how much there is would be known after reading all."""
        return {}

    def note_hash(self, run_dir: object) -> None:
        """See OpenedCorpus: there is no file to note it beside."""

    def viewed(self, config: Config, phase: int) -> OwnCorpus:
        """See Corpus."""
        seq_len, ignored = config.train.seq_len, config.data.ignore_token
        train = replace(self.train, seq_len=seq_len, ignore_token=ignored, phase=phase)
        return replace(self, train=train, held_out=replace(self.held_out, seq_len=seq_len, ignore_token=ignored))


def open_own(own: object, config: Config, say: Callable[[str], None] = lambda _: None) -> TextCorpus | OwnCorpus:
    """Open data of a user's own.

    Args:
        own: tokens[N], or samples (above).
        config: validated; model.vocab_size, data but what names texts, train.seq_len and train.seed are used.
        say: as open_text.

    Raises:
        ValueError: they are neither; texts are named besides; documents are to be packed; they are too few; a sample at
            either end is not one.
    """
    _check_settings(config)
    tokens = _in_one_row(own)
    if tokens is not None:
        vocab_size = config.model.vocab_size
        _check_below(tokens, vocab_size, "data")
        narrow = np.ascontiguousarray(tokens, dtype=dtype_for(vocab_size))
        file = TokenFile(narrow, vocab_size, hashlib.sha256(narrow.data).hexdigest())
        return corpus_of(OpenedText(_NAME, file, True, 0.0), config, say)
    if not isinstance(own, OwnSamples):
        raise ValueError(
            f"data must be tokens in one row, or samples with __len__ and __getitem__: got {type(own).__name__}: write "
            "its tokens to a file with tpengine.write_tokens, and give the file's path"
        )
    return _corpus_of_samples(own, config)


def view_of_own(corpus: TextCorpus | OwnCorpus, config: Config, phase: int) -> TextCorpus | OwnCorpus:
    """Return own data as a phase asks for them; ValueError if it names texts besides."""
    _check_settings(config)
    return corpus.viewed(config, phase)


def _corpus_of_samples(own: OwnSamples, config: Config) -> OwnCorpus:
    data, train, num = config.data, config.train, _answer("len(data)", lambda: len(own))
    if data.held_out:
        raise ValueError(
            f"own samples hold out their last ones: got data.held_out {data.held_out} too: leave it out, or write the "
            "samples to a token file"
        )
    num_held_out = math.ceil(num * data.held_out_share)
    needs = train.eval_micro_batches > 0 or train.sample_tokens > 0
    if num_held_out >= num or (needs and not num_held_out):
        raise ValueError(
            f"data must have samples to train on and, where a loss or a sample is asked for, some to hold out: {num} "
            f"samples, data.held_out_fraction {data.held_out_share:g} of them held out: use more samples or another "
            "fraction, or train.eval_micro_batches 0 and train.sample_tokens 0"
        )
    empty, numbers = np.empty(0, dtype=np.uint8), range(num)
    rest = _ReadSamples(
        empty,
        train.seq_len,
        config.model.vocab_size,
        data.ignore_token,
        own=own,
        numbers=numbers[num - num_held_out :],
    )
    samples = replace(rest, seed=train.seed, numbers=numbers[: num - num_held_out])
    return OwnCorpus(samples, rest, _identity_of(own, samples))


def _identity_of(own: OwnSamples, samples: _ReadSamples) -> str:
    """Return what identifies samples; read some of them, so that what is wrong with all is said at once."""
    num = len(own)
    hashed = np.unique(np.linspace(0, num - 1, min(num, _MOST_HASHED)).astype(np.int64)).tolist()
    told = getattr(own, "fingerprint", None)
    digest = hashlib.sha256()
    for number in hashed if told is None else (0, num - 1):
        found = samples.one(number)
        digest.update(len(found).to_bytes(8, "little") + found.astype("<u4").tobytes())
    if told is not None:
        return f"{num} samples given to tpengine.run, fingerprint {_answer('data.fingerprint()', told)}"
    return f"{num} samples given to tpengine.run, SHA-256 of {len(hashed)} {digest.hexdigest()[:_SHOWN_DIGITS]}"


def _answer(what: str, ask: Callable[[], Any]) -> Any:
    """Return what an object of the user's answers; ValueError in one line if it fails."""
    try:
        return ask()
    except Exception as error:
        raise ValueError(
            f"data must be readable: {what} fails: {type(error).__name__}: {error}: correct it, or write the tokens to "
            "a file with tpengine.write_tokens"
        ) from error


def _in_one_row(own: object) -> NDArray[Any] | None:
    """Return tokens in one row as an array; None of anything else."""
    is_list = isinstance(own, list | tuple) and all(type(token) is int for token in own)
    if not (isinstance(own, SupportsArray) or is_list):
        return None
    tokens = _answer("numpy.asarray(data)", lambda: np.asarray(own))
    return tokens if tokens.ndim == 1 and tokens.dtype != object else None


def _check_below(tokens: NDArray[Any], vocab_size: int, what: str) -> None:
    try:
        check_tokens(tokens, vocab_size, "model.vocab_size")
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _check_settings(config: Config) -> None:
    data = config.data
    named = data.mixture or (data.path if data.path != DataConfig().path else "")
    if named:
        raise ValueError(f"a run trains on one text: got data of your own, and {named}: leave one of them out")
    if data.columns:
        raise ValueError(
            f"columns lie beside token files: got data of your own, and data.columns {data.columns}: write them with "
            "tpengine.TokenWriter, or leave data.columns out"
        )
    if data.packing != "cut":
        raise ValueError(
            f"--data.packing {data.packing} needs token files, which say where documents begin: got data of your own: "
            "use packing cut, or write them with tpengine data"
        )
