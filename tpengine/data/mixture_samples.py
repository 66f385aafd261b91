"""The samples of a mixture: those of its sources, in turn, and what is held out of each.

A sample is read from its source by its number in that source's own order, so that nothing here has state either. Each
source has an order of its own, keyed by its place in the table, and repeats it in another order in each epoch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpengine.config import IGNORED_LABEL
from tpengine.data.columns import Column
from tpengine.data.mixture import Mixture, SourceEntry
from tpengine.data.samples import Samples
from tpengine.training.samples import Batch, PackedBatch, SamplePosition


class _OfSources:
    """Reads samples of several sources; the subclass says which sample is which."""

    sources: tuple[Samples, ...]

    @property
    def seq_len(self) -> int:
        """S."""
        return self.sources[0].seq_len

    @property
    def packs(self) -> bool:
        """Whether a sample is documents that do not see each other."""
        return self.sources[0].packs

    def batch(self, first_sample_index: int, count: int) -> Batch:
        """Read samples first_sample_index, first_sample_index + 1, ...; as `read`."""
        return self.read(np.arange(first_sample_index, first_sample_index + count, dtype=np.int64))

    def place(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each sample, and the sample's number in that source's own order."""
        raise NotImplementedError

    def read(self, samples: NDArray[np.int64]) -> Batch:
        """Read samples by their numbers; as Samples.read, with the source's name before what is wrong."""
        return self.read_with_starts(samples)[:2]

    def read_with_starts(self, samples: NDArray[np.int64]) -> PackedBatch:
        """Read samples, and where documents begin in them, as Samples.read_with_starts."""
        tokens = np.empty((len(samples), self.seq_len), dtype=np.int64)
        labels = np.empty_like(tokens)
        found = [np.empty(0, dtype=np.int64)] * (len(samples) if self.packs else 0)

        def take(of: Samples, now: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
            tokens[now], labels[now], starts = of.read_with_starts(numbers)
            for place, of_sample in zip(now.tolist() if self.packs else (), starts, strict=True):
                found[place] = of_sample

        self._each(samples, take)
        return tokens, labels, found

    @functools.cached_property
    def columns(self) -> tuple[Column, ...]:
        """The columns of its sources: all have them, but weights."""
        return tuple({column.name: column for source in self.sources for column in source.columns}.values())

    def read_columns(self, samples: NDArray[np.int64], labels: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Read what columns say of labels, as Samples.read_columns; of a source without weights each is 1."""
        found = {column.name: column.zeros(labels.shape) for column in self.columns}

        def take(of: Samples, now: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
            of_source = of.read_columns(numbers, labels[now]) if of.columns else {}
            for name, values in found.items():
                values[now] = of_source[name] if name in of_source else labels[now] != IGNORED_LABEL

        self._each(samples, take)
        return found

    def document_starts(self, samples: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return where documents begin in samples, as Samples.document_starts."""
        found = [np.empty(0, dtype=np.int64)] * len(samples)

        def take(of: Samples, now: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
            for place, starts in zip(now.tolist(), of.document_starts(numbers), strict=True):
                found[place] = starts

        if self.packs:
            self._each(samples, take)
        return found

    def _each(
        self, samples: NDArray[np.int64], take: Callable[[Samples, NDArray[np.int64], NDArray[np.int64]], None]
    ) -> None:
        """Call with each source, the places of its samples among those asked for, and their numbers in it."""
        sources, numbers = self.place(samples)
        for source in np.unique(sources).tolist():
            now = np.flatnonzero(sources == source)
            take(self.sources[source], now, numbers[now])


@dataclass(frozen=True)
class MixtureSamples(_OfSources):
    """The training samples of a mixture.

    Attributes:
        entries: the table.
        sources: the training samples of each.
        mixture: which sample is of which source.
    """

    entries: tuple[SourceEntry, ...]
    sources: tuple[Samples, ...]
    mixture: Mixture

    @property
    def num_windows(self) -> int:
        """Windows of all sources."""
        return sum(source.num_windows for source in self.sources)

    @functools.cached_property
    def limits(self) -> tuple[float, ...]:
        """How many samples each source may give, all epochs together; inf for without end."""
        return tuple(
            math.inf if math.isinf(entry.epochs) else int(Fraction(repr(entry.epochs)) * source.num_windows)
            for entry, source in zip(self.entries, self.sources, strict=True)
        )

    def place(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See _OfSources.

        Raises:
            ValueError: a source is used up; a run is refused before it starts, unless a rollback has left out samples.
        """
        sources, numbers = self.mixture.place(samples)
        over = numbers >= np.array(self.limits)[sources]
        if over.any():
            entry = self.entries[int(sources[over][0])]
            raise ValueError(
                f"a source may be read {entry.epochs:g} times at most: {entry.name} of the mixture, {entry.path}, is "
                "used up: allow it more epochs and continue with --resume --data.mixture FILE, or end the run here"
            )
        return sources, numbers

    def counts(self, position: SamplePosition) -> tuple[int, ...]:
        """Return how many samples of each source a run has read at a position; what is left out does not count."""
        end = int(position.samples(0, 1)[0])
        read = np.array(self.mixture.counts(end), dtype=np.int64)
        for first, last in position.left_out:
            if last <= end:
                read -= np.array(self.mixture.counts(last)) - np.array(self.mixture.counts(first))
        return tuple(read.tolist())

    def progress(self, position: SamplePosition) -> dict[str, float]:
        """Return each source's share of the samples so far, and its epochs: fields of a row of metrics."""
        found: dict[str, float] = {}
        for entry, source, count in zip(self.entries, self.sources, self.counts(position), strict=True):
            found[f"share/{entry.name}"] = count / max(1, position.consumed)
            found[f"epochs/{entry.name}"] = count / source.num_windows
        return found


@dataclass(frozen=True)
class HeldOutSamples(_OfSources):
    """The held-out samples of a mixture that a loss is computed on: of each source as many, one source after another.

    Attributes:
        names, shares: of the sources.
        sources: the held-out samples of each.
        counts: how many of its first samples each gives.
    """

    names: tuple[str, ...]
    shares: tuple[float, ...]
    sources: tuple[Samples, ...]
    counts: tuple[int, ...]

    @property
    def num_windows(self) -> int:
        """Samples of all sources."""
        return sum(self.counts)

    def place(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See _OfSources; beyond the last sample they begin anew."""
        ends = np.cumsum(self.counts)
        within = samples % ends[-1]
        sources = np.searchsorted(ends, within, side="right")
        return sources, within - np.concatenate(([0], ends))[sources]


def evenly(available: Sequence[int], total: int) -> tuple[int, ...]:
    """Share a total as evenly as possible; where a source has less, the others get its rest.

    Args: available: of each source.
    """
    counts, left = [0] * len(available), total
    for done, source in enumerate(sorted(range(len(available)), key=lambda source: available[source])):
        counts[source] = min(available[source], left // (len(available) - done))
        left -= counts[source]
    return tuple(counts)
