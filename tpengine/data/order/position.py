"""Where a run is in its samples: which order, how many of it were read, and what is left out.

    sample i of a run = the i-th number of the order that is not in a left-out range

So a step keeps its number of samples, whatever is left out. The position before a step follows from the step alone
(Trainer.position), and a checkpoint holds it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Position:
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

    def after(self, num_samples: int) -> Position:
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
