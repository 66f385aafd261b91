"""What training asks of a text: samples, read by their numbers, and where a run is in their order. No torch.

A position says which order, how many of it were read, and what is left out:

    sample i of a run = the i-th number of the order that is not in a left-out range

So a step keeps its number of samples, whatever is left out. The position before a step follows from the step alone
(Trainer.position), and a checkpoint holds it. The order itself, and what is read, are those of whoever has the text:
the room data has texts and mixtures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tpengine.config import Config

# tokens[count, S] and labels[count, S], int64.
Batch = tuple[NDArray[np.int64], NDArray[np.int64]]
# These, and where documents begin in each sample.
PackedBatch = tuple[NDArray[np.int64], NDArray[np.int64], list[NDArray[np.int64]]]
# The column of a text that weighs the loss of each target.
WEIGHTS = "weights"


@dataclass(frozen=True)
class SamplePosition:
    """A place in an order of samples.

    Attributes:
        phase: the phase that began the order, which is part of the order's key; 0 in a run of one phase.
        consumed: samples of the order that earlier steps have read; what is left out does not count.
        left_out: half-open ranges of numbers of the order that no step reads, ascending, not empty, without overlaps.

    Raises:
        ValueError: ranges that do not ascend.
    """

    phase: int = 0
    consumed: int = 0
    left_out: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        end = 0
        for first, last in self.left_out:
            if not end <= first < last:
                raise ValueError(
                    f"ranges of left-out samples must ascend without overlaps: got {first} to {last} after {end}: "
                    "sort and merge them"
                )
            end = last

    def after(self, num_samples: int) -> SamplePosition:
        """Return the position after so many more samples."""
        return replace(self, consumed=self.consumed + num_samples)

    def samples(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the numbers, in the order, of samples first, first + 1, ... of those that come next; int64 [count]."""
        wanted = np.arange(self.consumed + first, self.consumed + first + count, dtype=np.int64)
        if not self.left_out:
            return wanted
        ranges = np.array(self.left_out, dtype=np.int64)
        lengths = ranges[:, 1] - ranges[:, 0]
        ends = np.cumsum(lengths)
        # How many samples are kept before each range; a sample is moved by all ranges before it.
        kept_before = ranges[:, 0] - (ends - lengths)
        num_ranges = np.searchsorted(kept_before, wanted, side="right")
        moved: NDArray[np.int64] = wanted + np.concatenate(([0], ends))[num_ranges]
        return moved

    def range_of(self, count: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges of numbers that the next `count` samples are: what must be left out to skip them."""
        numbers = self.samples(0, count)
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
        return tuple((int(part[0]), int(part[-1]) + 1) for part in np.split(numbers, breaks) if len(part))


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

    @property
    def columns(self) -> Sequence[Any]:
        """The columns that are read with tokens; most texts have none."""

    def batch(self, first_sample_index: int, count: int) -> Batch:
        """Read samples first_sample_index, first_sample_index + 1, ..."""

    def read(self, samples: NDArray[np.int64]) -> Batch:
        """Read samples by their numbers; labels are one token ahead of tokens."""

    def document_starts(self, samples: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return where documents begin in samples, after the first token of each."""

    def read_with_starts(self, samples: NDArray[np.int64]) -> PackedBatch:
        """Read samples, and where documents begin in them, with one search."""

    def read_columns(self, samples: NDArray[np.int64], labels: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return each column's values of the tokens that labels are, zero where one is ignored.

        Returns: by name, [count, S] or [count, S, width]; WEIGHTS as float32.
        """


class TrainingSamples(SampleReader, Protocol):
    """What a run trains on."""

    def progress(self, position: SamplePosition) -> dict[str, float]:
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


class Corpus(Protocol):
    """A text or a mixture, cut into a part for training and a held-out part.

    Attributes:
        train, held_out: the parts.
    """

    @property
    def train(self) -> TrainingSamples: ...

    @property
    def held_out(self) -> HeldOut: ...

    def fingerprint(self) -> str:
        """Return what identifies its content and how it is mixed; see checkpoint/fingerprint.py."""

    def fingerprint_of_ends(self) -> str:
        """Return what checkpoints identified a text by before its content was hashed; empty for a mixture."""

    def padding(self) -> Mapping[str, float]:
        """Return the share of padding in the training samples of each source, by name; empty if none are fitted."""

    def viewed(self, config: Config, phase: int) -> Corpus:
        """Return it in windows of a configuration's length, its targets that do not count, in the order of a phase.

        Raises:
            ValueError: it is too short.
        """


def batch_digest(
    tokens: NDArray[np.int64],
    labels: NDArray[np.int64],
    document_starts: Sequence[NDArray[np.int64]] = (),
    columns: Mapping[str, NDArray[Any]] = MappingProxyType({}),
) -> int:
    """Hash the windows of a batch, so that ranks that must have read the same batch can compare one number.

    Hashed are the tokens and the last label of each sample: all other labels are tokens too.

    Args:
        tokens, labels: int64 [count, S], as `Samples.read` returns them.
        document_starts: of each sample, as `Samples.document_starts` returns them; of packed samples alone.
        columns: of the samples, as `SampleReader.read_columns` returns them.
    Returns: at least 0 and below 2**63; equal batches have equal numbers on every machine, different ones with
        probability 2**-63.
    Cost: one pass over 4 bytes per token, 10 us for 2,048 tokens and 8 ms for a million on an AMD EPYC.
    """
    digest = hashlib.sha256(repr(tokens.shape).encode())
    for part in (tokens, labels[:, -1]):
        digest.update(part.astype("<u4").tobytes())
    for starts in document_starts:
        digest.update(len(starts).to_bytes(8, "little") + starts.astype("<i8").tobytes())
    for values in columns.values():
        digest.update(np.ascontiguousarray(values).data)
    return int.from_bytes(digest.digest()[:8], "little") >> 1


def first_sample_index(
    step: int, dp_rank: int, dp: int, micro_batch: int, *, num_micro_batches: int, micro_batch_size: int
) -> int:
    """Return the global index of the first sample of a micro-batch.

        global micro-batch g = dp_rank * num_micro_batches + micro_batch      (one contiguous block per replica)
        index = (step * dp * num_micro_batches + g) * micro_batch_size

    so one process with dp * num_micro_batches micro-batches reads the same global batch.

    Args:
        step: optimizer step.
        dp_rank, dp: number of this replica, and how many there are.
        micro_batch: number of the micro-batch, of the replica's num_micro_batches.
        micro_batch_size: samples per micro-batch.
    """
    global_micro_batch = dp_rank * num_micro_batches + micro_batch
    return (step * dp * num_micro_batches + global_micro_batch) * micro_batch_size
