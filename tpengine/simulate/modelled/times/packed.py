"""Packed documents, which do not see each other: what attention computes of a micro-batch depends on their lengths.

A document of n tokens has n (n + 1) / 2 pairs of a query and a key. So of two micro-batches with equally many tokens
one may cost many times as much as the other: in a pipeline every stage waits for the dearest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tpkernels.work import visible_pairs


@dataclass(frozen=True)
class Packed:
    """The documents of some micro-batches.

    Attributes:
        lengths: of each micro-batch, the tokens of each document, or part of one.
    """

    lengths: tuple[tuple[int, ...], ...]

    def pairs(self, window: int | None = None) -> int:
        """Return the pairs of a query and a key that attention computes in a micro-batch: the mean.

        Args:
            window: as visible_pairs.
        """
        return round(sum(visible_pairs(of, window) for of in self.lengths) / len(self.lengths))

    @property
    def worst(self) -> Packed:
        """The micro-batch with most pairs, alone."""
        return Packed((max(self.lengths, key=visible_pairs),))

    @property
    def num_tokens(self) -> int:
        """Tokens of a micro-batch."""
        return sum(self.lengths[0])


def packed_of(starts: Sequence[Sequence[int]], seq_len: int, micro_batch_size: int) -> Packed:
    """Return the documents of micro-batches.

    Args:
        starts: where documents begin in each sample after its first token (Samples.document_starts); samples that do
            not fill a micro-batch are left out.
        seq_len: tokens of a sample.
        micro_batch_size: samples of a micro-batch.
    """
    of_sample = []
    for inner in starts:
        ends = [*inner, seq_len]
        of_sample.append([end - begin for begin, end in zip([0, *inner], ends, strict=True)])
    lengths = []
    for first in range(0, len(of_sample) - micro_batch_size + 1, micro_batch_size):
        lengths.append(tuple(length for sample in of_sample[first : first + micro_batch_size] for length in sample))
    return Packed(tuple(lengths))
