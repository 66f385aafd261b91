"""Samples of a text, read by their numbers: its windows, or whole documents as an index puts them together.

What training asks of samples, also of those of a mixture, is said in training/samples.py. Nothing here has state: the
order of samples is a function of (seed, global sample index) alone, so every layout of ranks, and every restart, reads
the same global batches. The trainer turns the arrays into tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tpengine.config import IGNORED_LABEL
from tpengine.data.columns import Column
from tpengine.data.fit_index import FitPiece, FittedPart
from tpengine.data.order import permute, permute_one
from tpengine.data.token_file import TextTokens
from tpengine.training.samples import WEIGHTS, Batch, PackedBatch, SamplePosition

# What padding is made of: its labels do not count, and no document sees it.
_PADDING = 0


@runtime_checkable
class HasDocuments(Protocol):
    """Tokens that know where documents begin in them."""

    def document_starts(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return the first tokens of all documents that begin in [begin, end), ascending."""


# So many numbers are permuted one by one: 6 us each, all together 90 us.
_FEW = 8


@dataclass(frozen=True)
class Samples:
    """The windows of one part of the text: window w has tokens [w*S, w*S + S]; labels are one token ahead of inputs.

    Attributes:
        tokens: of this part.
        seq_len: S.
        vocab_size: of the model; a larger token is an error when its window is read.
        ignore_token: labels equal to it become IGNORED_LABEL.
        seed: key of the order; None for the order of the text. Either way the text is repeated without end.
        phase: the phase of a run whose order this is, key of it besides.
        packs: whether a window is documents that do not see each other: the label that would be the first token of the
            next document becomes IGNORED_LABEL.
        source: place of the text in the table of a mixture, key of the order besides; None for a text by itself.
        columns: those that are read with the tokens, as they are handed out; the tokens have them open.
    """

    tokens: TextTokens
    seq_len: int
    vocab_size: int
    ignore_token: int | None = None
    seed: int | None = None
    phase: int = 0
    packs: bool = False
    source: int | None = None
    columns: tuple[Column, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of sources: a text is one without a name."""
        return ("",)

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares of sources."""
        return (1.0,)

    def place(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each sample, and the sample's number in it."""
        return np.zeros_like(samples), samples

    def progress(self, position: SamplePosition) -> dict[str, float]:
        """Return what a row of metrics says of sources: nothing of one text."""
        return {}

    @property
    def num_windows(self) -> int:
        """The number of windows; they do not overlap, and each needs one more token for its last label."""
        return max(0, len(self.tokens) - 1) // self.seq_len

    def batch(self, first_sample_index: int, count: int) -> Batch:
        """Read samples first_sample_index, first_sample_index + 1, ...; as `read`."""
        return self.read(np.arange(first_sample_index, first_sample_index + count, dtype=np.int64))

    def read(self, samples: NDArray[np.int64]) -> Batch:
        """Read samples by their numbers in the order.

        Returns: tokens[count, S] and labels[count, S], int64, contiguous, writable.
        Raises: ValueError: a token outside the model's vocabulary; not one whole window; a file that was cut short.
        """
        return self.read_with_starts(samples)[:2]

    def read_with_starts(self, samples: NDArray[np.int64]) -> PackedBatch:
        """Read samples, and where documents begin in them, with one search.

        Returns: as `read`, and as `document_starts`; an empty list where the samples are not packed.
        Raises: ValueError: as `read` and `document_starts`.
        """
        if not self.num_windows:
            raise ValueError(
                f"a window must fit the text: {len(self.tokens)} tokens, seq_len {self.seq_len} and one more: "
                "use a smaller seq_len or more text"
            )
        firsts = [window * self.seq_len for window in self._windows(samples)]
        tokens = np.empty((len(firsts), self.seq_len), dtype=np.int64)
        labels = np.empty_like(tokens)
        for row, first in enumerate(firsts):
            text = self.tokens[first : first + self.seq_len + 1]
            if text.max() >= self.vocab_size:
                raise ValueError(self._beyond([(first, first + self.seq_len + 1) for first in firsts]))
            tokens[row], labels[row] = text[:-1], text[1:]
        if self.ignore_token is not None:
            labels[labels == self.ignore_token] = IGNORED_LABEL
        if not self.packs:
            return tokens, labels, []
        starts = self._document_starts(firsts)
        for of_sample, starts_in in zip(labels, starts, strict=True):
            of_sample[starts_in - 1] = IGNORED_LABEL
        return tokens, labels, [self._inside(of) for of in starts]

    def read_columns(self, samples: NDArray[np.int64], labels: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Read what columns say of labels.

            columns[i, t] = the stored values of the token that labels[i, t] is, zero where that is IGNORED_LABEL

        Args: samples: by their numbers. labels: of them, as `read` returns them.
        Returns: of each column, by name, [count, S], or [count, S, width] of a wider one; contiguous, writable.
        Raises: ValueError: as `read`; weights that are negative or not finite.
        """
        found = {column.name: column.zeros(labels.shape) for column in self.columns}
        assert not isinstance(self.tokens, np.ndarray), "a text in memory has no columns"
        for row, targets in enumerate(self._targets(samples)):
            for place, begin, end in targets:
                for name, values in found.items():
                    stored = self.tokens.read_column(name, begin, end)
                    if name == WEIGHTS:
                        self._check_weights(stored, begin)
                    values[row, place : place + end - begin] = stored
        for values in found.values():
            values[labels == IGNORED_LABEL] = 0
        return found

    def _targets(self, samples: NDArray[np.int64]) -> Iterator[list[tuple[int, int, int]]]:
        """Yield of each sample which tokens of the text its labels are: a place in it, and the range from there on."""
        for window in self._windows(samples):
            first = window * self.seq_len + 1
            yield [(0, first, first + self.seq_len)]

    def _check_weights(self, weights: NDArray[Any], first: int) -> None:
        """Raise ValueError if a weight is none; `first` is the number of its token in the text."""
        wrong = np.flatnonzero(~((weights >= 0) & np.isfinite(weights)))
        if len(wrong):
            assert not isinstance(self.tokens, np.ndarray)
            path, number = self.tokens.where(first + int(wrong[0]))
            raise ValueError(
                f"weights must be finite and at least 0: token {number} of {path} has {weights[wrong[0]]}: write that "
                "column again"
            )

    def document_starts(self, samples: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return, for samples of the order, where documents begin in each, after its first token.

        Returns: ascending places above 0 and below S; none where the samples are not packed.
        Raises: ValueError: the file cannot be read.
        """
        if not self.packs:
            return [np.empty(0, dtype=np.int64)] * len(samples)
        firsts = [window * self.seq_len for window in self._windows(samples)]
        return [self._inside(starts) for starts in self._document_starts(firsts)]

    def _document_starts(self, firsts: Sequence[int]) -> list[NDArray[np.int64]]:
        """Return where documents begin in windows and right behind them, after the first token of each."""
        assert isinstance(self.tokens, HasDocuments), "packed samples have documents"
        return [self.tokens.document_starts(first + 1, first + self.seq_len + 1) - first for first in firsts]

    def _inside(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Leave out the document that begins right behind a window."""
        return starts[:-1] if len(starts) and starts[-1] == self.seq_len else starts

    def _beyond(self, ranges: Sequence[tuple[int, int]]) -> str:
        """Say which token in some ranges of the text is beyond the vocabulary, and where the first one is."""
        text = np.concatenate([self.tokens[begin:end] for begin, end in ranges])
        places = np.concatenate([np.arange(begin, end) for begin, end in ranges])
        first_of = int(np.argmax(text >= self.vocab_size))
        first, largest, place = int(text[first_of]), int(text.max()), int(places[first_of])
        where = f"token {place} of the text"
        if not isinstance(self.tokens, np.ndarray):
            path, number = self.tokens.where(place)
            where = f"token {number} of {path}"
        return (
            f"tokens must be at least 0 and below model.vocab_size: got {largest}, model.vocab_size {self.vocab_size}; "
            f"the first beyond it, {first}, is {where}: use model.vocab_size {largest + 1} or other text"
        )

    def _windows(self, samples: NDArray[np.int64]) -> list[int]:
        """The window of each sample; each pass over the text has an order of its own over all windows."""
        num = self.num_windows
        if self.seed is None:
            return (samples % num).tolist()
        # A run of one phase and one text has the order that it had before there were phases and mixtures.
        what = "sample order" if self.source is None else f"sample order of source {self.source}"
        what += f" of phase {self.phase}" if self.phase else ""
        if len(samples) <= _FEW:
            return [permute_one(sample % num, num, self.seed, sample // num, what) for sample in samples.tolist()]
        epochs, places = np.divmod(samples, num)
        for epoch in np.unique(epochs).tolist():
            now = epochs == epoch
            places[now] = permute(places[now], num, self.seed, epoch, what)
        return places.tolist()


@dataclass(frozen=True)
class FittedSamples(Samples):
    """The samples that an index makes of one part of a text.

    A document of at most S tokens is in a sample as a whole; of a longer one each S tokens are a sample, and what is
    left is fitted. The label of a document's last token is ignored; behind a piece it is the document's next token.
    Padding is one more document, whose labels are ignored.

    Attributes:
        part: which documents each sample has; of this part of the text, and of this seq_len.
    """

    part: FittedPart = field(kw_only=True)

    @property
    def num_windows(self) -> int:
        """The number of samples."""
        return self.part.num_samples

    def read_with_starts(self, samples: NDArray[np.int64]) -> PackedBatch:
        """See Samples.read_with_starts."""
        fitted = self._fitted(samples)
        tokens = np.full((len(fitted), self.seq_len), _PADDING, dtype=np.int64)
        labels = np.full_like(tokens, IGNORED_LABEL)
        for row, pieces in enumerate(fitted):
            place = 0
            for start, length, goes_on in pieces:
                text = self.tokens[start : start + length + goes_on]
                if text.max() >= self.vocab_size:
                    raise ValueError(self._beyond([(start, start + length + goes_on)]))
                tokens[row, place : place + length] = text[:length]
                labels[row, place : place + len(text) - 1] = text[1:]
                place += length
        if self.ignore_token is not None:
            labels[labels == self.ignore_token] = IGNORED_LABEL
        return tokens, labels, [self._starts_in(pieces) for pieces in fitted]

    def document_starts(self, samples: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """See Samples.document_starts; padding begins as a document does."""
        return [self._starts_in(pieces) for pieces in self._fitted(samples)]

    def _targets(self, samples: NDArray[np.int64]) -> Iterator[list[tuple[int, int, int]]]:
        """See Samples._targets."""
        for pieces in self._fitted(samples):
            places = np.cumsum([0, *(piece.length for piece in pieces)]).tolist()
            yield [
                (place, start + 1, start + length + goes_on)
                for place, (start, length, goes_on) in zip(places, pieces, strict=False)
                if length + goes_on > 1
            ]

    def _fitted(self, samples: NDArray[np.int64]) -> list[list[FitPiece]]:
        if not self.num_windows:
            raise ValueError(
                f"fitted samples must have a document: {self.part.path} has none of this part of the text: use more "
                "text, or another held_out_fraction"
            )
        return [self.part.sample(number) for number in self._windows(samples)]

    def _starts_in(self, pieces: Sequence[FitPiece]) -> NDArray[np.int64]:
        ends = np.cumsum([piece.length for piece in pieces])
        return ends[ends < self.seq_len]


def fitted(samples: Samples, part: FittedPart) -> FittedSamples:
    """Return samples of a part of a text as an index fits them, with all else as it is."""
    values = {each.name: getattr(samples, each.name) for each in fields(Samples)}
    return FittedSamples(**values, part=part)
