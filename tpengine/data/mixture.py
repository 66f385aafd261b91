"""Mixtures: which sample of which source is sample i, as a function of (seed, i, weights) alone.

Samples come in blocks of N. Up to the end of a block, source k has had

    c_k = floor(W_k n) - floor(W_(k-1) n)      of n samples, W_k = w_0 + ... + w_k, weights that add up to 1

so that counts add up to n, and each differs from w_k n by less than 1, after any number of blocks. Inside a block an
order of its own, keyed by (seed, block), says which place belongs to which source. Nothing is stored and nothing
drifts: all is computed from i, with integers.

The decision a reader will question: differences of floors may fall from one n to the next, where w_k N < 1. So N is
1,024, or the power of two above that at which every source's share of a block is at least a sample.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from tpengine.data.order import permute

BLOCK = 1024
_MOST_BLOCKS_CACHED = 64


@dataclass(frozen=True)
class Mixture:
    """Shares of sources in a sequence of samples without end.

    Attributes:
        weights: of the sources, above 0; they need not add up to 1. A weight counts as the decimal number that it is
            written as.
        seed: key of the order of sources within blocks.
    """

    weights: tuple[float, ...]
    seed: int

    def __post_init__(self) -> None:
        if not self.weights or not all(math.isfinite(weight) and weight > 0 for weight in self.weights):
            raise ValueError(f"weights of sources must be above 0 and finite: got {list(self.weights)}")

    @functools.cached_property
    def _bounds(self) -> tuple[int, ...]:
        """0, W_0, W_1, ... in units of 1 / the last."""
        exact = [Fraction(repr(float(weight))) for weight in self.weights]
        unit = math.lcm(*(weight.denominator for weight in exact))
        numerators = [int(weight * unit) for weight in exact]
        common = math.gcd(*numerators)
        return tuple(accumulate((numerator // common for numerator in numerators), initial=0))

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """w_k, which add up to 1."""
        bounds = self._bounds
        return tuple(Fraction(after - before, bounds[-1]) for before, after in pairwise(bounds))

    @functools.cached_property
    def block(self) -> int:
        """N: samples of a block."""
        size = BLOCK
        while min(self.shares) * size < 1:
            size *= 2
        return size

    def counts_at(self, num_blocks: int) -> tuple[int, ...]:
        """Return how many samples each source has had at the end of a number of blocks."""
        n = num_blocks * self.block
        ends = [bound * n // self._bounds[-1] for bound in self._bounds]
        return tuple(after - before for before, after in pairwise(ends))

    def counts(self, num_samples: int) -> tuple[int, ...]:
        """Return how many of the first samples come from each source."""
        num_blocks, rest = divmod(num_samples, self.block)
        sources, _ = self.place(num_blocks * self.block + np.arange(rest, dtype=np.int64))
        of_rest = np.bincount(sources, minlength=len(self.weights)).tolist()
        return tuple(map(sum, zip(self.counts_at(num_blocks), of_rest, strict=True)))

    def place(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each sample, and the sample's number in that source's own sequence.

        Args: samples: int64 [n], numbers in the mixture.
        Returns: sources and numbers, int64 [n]. Every number of a source occurs once.
        Cost: O(sources) a block and a binary search a sample.
        """
        sources, numbers = np.empty_like(samples), np.empty_like(samples)
        blocks, places = np.divmod(samples, self.block)
        for block in np.unique(blocks).tolist():
            now = blocks == block
            before, ends = _of_block(self, block)
            permuted = permute(places[now], self.block, self.seed, block, "sources of a block")
            source = np.searchsorted(ends, permuted, side="right") - 1
            sources[now], numbers[now] = source, before[source] + permuted - ends[source]
        return sources, numbers


@functools.lru_cache(maxsize=_MOST_BLOCKS_CACHED)
def _of_block(mixture: Mixture, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each source's count before a block, and where its places in the block begin, the block's end last."""
    before, after = mixture.counts_at(block), mixture.counts_at(block + 1)
    own: Sequence[int] = [last - first for first, last in zip(before, after, strict=True)]
    return np.array(before, dtype=np.int64), np.array([0, *accumulate(own)], dtype=np.int64)


def steps_until(mixture: Mixture, source: int, num_samples: int, global_batch: int) -> int:
    """Return how many whole steps a source of some samples lasts: the steps before the one that needs one more.

    Args:
        source: its number.
        num_samples: what it may give, all epochs together.
        global_batch: samples of a step.

    Cost: a bisection over steps.
    """
    low, high = 0, 1
    while mixture.counts(high * global_batch)[source] <= num_samples:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if mixture.counts(middle * global_batch)[source] <= num_samples:
            low = middle
        else:
            high = middle
    return low
