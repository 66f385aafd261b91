"""Fitted samples: whole documents, as an index puts them together, and padding behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from tpengine.config import IGNORED_LABEL
from tpengine.data.fit.index import FittedPart, Piece
from tpengine.data.samples.reader import PackedBatch
from tpengine.data.samples.windows import Samples

# What padding is made of: its labels do not count, and no document sees it.
_PADDING = 0


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

    def _fitted(self, samples: NDArray[np.int64]) -> list[list[Piece]]:
        if not self.num_windows:
            raise ValueError(
                f"fitted samples must have a document: {self.part.path} has none of this part of the text: use more "
                "text, or another held_out_fraction"
            )
        return [self.part.sample(number) for number in self._windows(samples)]

    def _starts_in(self, pieces: Sequence[Piece]) -> NDArray[np.int64]:
        ends = np.cumsum([piece.length for piece in pieces])
        return ends[ends < self.seq_len]


def fitted(samples: Samples, part: FittedPart) -> FittedSamples:
    """Return samples of a part of a text as an index fits them, with all else as it is."""
    values = {each.name: getattr(samples, each.name) for each in fields(Samples)}
    return FittedSamples(**values, part=part)
