"""What is asked of samples, whether they are those of a text or of a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tpengine.data.order.position import Position

# tokens[count, S] and labels[count, S], int64.
Batch = tuple[NDArray[np.int64], NDArray[np.int64]]
# These, and where documents begin in each sample.
PackedBatch = tuple[NDArray[np.int64], NDArray[np.int64], list[NDArray[np.int64]]]


class SampleReader(Protocol):
    """Samples that are read by their numbers, as Samples and MixtureSamples are; it has no state."""

    @property
    def seq_len(self) -> int:
        """Tokens of a sample."""

    @property
    def packs(self) -> bool:
        """Whether a sample is documents that do not see each other."""

    @property
    def num_windows(self) -> int:
        """Number of different samples."""

    def batch(self, first_sample_index: int, count: int) -> Batch:
        """Read samples first_sample_index, first_sample_index + 1, ..."""

    def read(self, samples: NDArray[np.int64]) -> Batch:
        """Read samples by their numbers; see Samples.read."""

    def document_starts(self, samples: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return where documents begin in samples; see Samples.document_starts."""

    def read_with_starts(self, samples: NDArray[np.int64]) -> PackedBatch:
        """Read samples, and where documents begin in them; see Samples.read_with_starts."""


class TrainingSamples(SampleReader, Protocol):
    """What a run trains on."""

    def progress(self, position: Position) -> dict[str, float]:
        """Return what a row of metrics says of the sources at a position; nothing of a text."""


class HeldOut(SampleReader, Protocol):
    """What is held out: samples 0, 1, ... are those that a loss is computed on first.

    Attributes:
        names: of the sources; one without a name, for a text.
        shares: of each in the loss of the whole.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def shares(self) -> Sequence[float]: ...

    def place(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each sample, and the sample's number in that source."""
