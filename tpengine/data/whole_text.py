"""Every token of a file in samples, and what is found for their labels brought back to the tokens.

Samples are those of --data.packing fit, without an index: a document of at most S tokens is in one as a whole, of a
longer one each S tokens, whose last label is the token behind them. Pieces that lie near each other in the text are
fitted together, so that values come in the order of the text, some at a time. A file that does not know its documents
is one document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tpengine.config import IGNORED_LABEL
from tpengine.data.fitting import best_fit, documents_in, pieces_of
from tpengine.data.source_files import SourceFile


@dataclass(frozen=True, eq=False)
class Stretch:
    """Consecutive tokens of a file, in samples.

    Attributes:
        tokens, labels: int64 [R, S]; labels are one token ahead, IGNORED_LABEL at a document's end and in padding.
        starts: where documents begin in each sample, after its first token.
        first, num: values are of tokens first, first + 1, ... of the file.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    starts: tuple[NDArray[np.int64], ...]
    first: int
    num: int
    _from: NDArray[np.int64]
    _to: NDArray[np.int64]

    def of_tokens(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return values[R, S], those of labels, as those of the file's tokens [num]; 0 where a token is no label."""
        found = np.zeros(self.num, dtype=values.dtype)
        found[self._to] = values.reshape(-1)[self._from]
        return found


def stretches_of(file: SourceFile, seq_len: int, num_tokens: int) -> Iterator[Stretch]:
    """Yield all of a file, in order: values of its first token, which is nobody's label, are of none.

    Args:
        file: of tokens.
        seq_len: S.
        num_tokens: of a stretch, about.

    Raises: ValueError: documents that do not ascend; a file that cannot be read.
    """
    whole = [(np.zeros(1, np.int64), np.array([len(file.tokens)]))]
    documents = whole if file.starts is None else documents_in(file.starts, 0, len(file.tokens), seq_len)
    for starts, of_documents in documents:
        pieces = pieces_of(starts, of_documents, seq_len)
        ends, first = np.cumsum(pieces[1]), 0
        while first < len(ends):
            before = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, before + num_tokens, side="right")))
            yield _fitted(file, seq_len, *(of[first:last] for of in pieces))
            first = last


def _fitted(
    file: SourceFile,
    seq_len: int,
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    goes_on: NDArray[np.int64],
) -> Stretch:
    """Put consecutive pieces into samples."""
    sample = best_fit(lengths, seq_len)
    # Within a sample the pieces are in the order of the text.
    order = np.argsort(sample, kind="stable")
    first, sample, starts, lengths, goes_on = int(starts[0]), *(of[order] for of in (sample, starts, lengths, goes_on))
    before = np.cumsum(lengths) - lengths
    offset = before - before[np.searchsorted(sample, sample)]
    # Each token's place in the samples, and in the text from `first` on.
    within = np.arange(int(lengths.sum())) - np.repeat(before, lengths)
    place = np.repeat(sample * seq_len + offset, lengths) + within
    text_place = np.repeat(starts - first, lengths) + within
    text = file.tokens[first : first + len(place) + 1].astype(np.int64)
    tokens = np.zeros((int(sample[-1]) + 1, seq_len), dtype=np.int64)
    labels = np.full_like(tokens, IGNORED_LABEL)
    tokens.reshape(-1)[place] = text[text_place]
    has_label = (within < np.repeat(lengths - 1, lengths)) | np.repeat(goes_on > 0, lengths)
    place, text_place = place[has_label], text_place[has_label]
    labels.reshape(-1)[place] = text[text_place + 1]
    ends = offset + lengths
    inner = [of[of < seq_len] for of in np.split(ends, np.flatnonzero(np.diff(sample)) + 1)]
    return Stretch(tokens, labels, tuple(inner), first + 1, len(text) - 1, place, text_place)
