"""A mixture: the table of its sources, and which sample of which source is sample i.

The table is a file of TOML.

    web  = { path = "web.tokens",  weight = 0.6 }
    code = { path = "code.tokens", weight = 0.3, epochs = 4 }
    math = { path = "math.tokens", weight = 0.1, epochs = inf, held_out = "math-test.tokens" }

The order of the table is part of the order of samples: what a source gives is keyed by its place.

Which sample of which source is sample i is a function of (seed, i, weights) alone. Samples come in blocks of N. Up to
the end of a block, source k has had

    c_k = floor(W_k n) - floor(W_(k-1) n)      of n samples, W_k = w_0 + ... + w_k, weights that add up to 1

so that counts add up to n, and each differs from w_k n by less than 1, after any number of blocks. Inside a block an
order of its own, keyed by (seed, block), says which place belongs to which source. Nothing is stored and nothing
drifts: all is computed from i, with integers. The samples of a source have its numbers 0, 1, 2, ... in their order.

The decision a reader will question: differences of floors may fall from one n to the next, where w_k N < 1, unless the
source is the first (a floor) or the last (n less a floor). So the rarest is counted first and the next one last, and N
is 1,024, or the power of two above that at which all others have at least a sample of a block; a share below one
sample of 2**20 among these is refused. A source of weight 0 is never read.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpengine.config.toml import read_toml
from tpengine.data.order import permute
from tpengine.spelling import did_you_mean

# A row of metrics.jsonl names each source three times.
_MOST_SOURCES = 256
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
BLOCK = 1024
_LARGEST_BLOCK = 2**20
# Of the largest blocks 16 MB each.
_MOST_BLOCKS_CACHED = 4


@dataclass(frozen=True)
class SourceEntry:
    """A source as the file gives it.

    Attributes:
        name: what metrics and messages call it.
        path: as --data.path; relative to the directory where the run is started.
        weight: its share of the samples, relative to the others'; 0 for a source that is held out only.
        epochs: how often its text may be read at most; inf for without end.
        held_out: a text of its own that is evaluated for it, as data.held_out; empty for the last part of its text.
    """

    name: str
    path: str
    weight: float
    epochs: float = 1.0
    held_out: str = ""


_KEYS = tuple(field.name for field in fields(SourceEntry) if field.name != "name")


def read_table(path: str | Path) -> tuple[SourceEntry, ...]:
    """Read the file of a mixture.

    Raises:
        ValueError: it cannot be read, or is no table of sources; one line with path, place and remedy.
    """
    values = read_toml(path, "--data.mixture")
    try:
        entries = tuple(_entry(name, value) for name, value in values.items())
        _check_all(entries)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return entries


def _check_all(entries: tuple[SourceEntry, ...]) -> None:
    if not 1 <= len(entries) <= _MOST_SOURCES:
        raise ValueError(
            f"a mixture has 1 to {_MOST_SOURCES} sources: got {len(entries)}: write a line for each, such as "
            'web = { path = "web.tokens", weight = 0.7 }'
        )
    if not any(entry.weight for entry in entries):
        raise ValueError(
            f"weights of a mixture must not all be 0: those of {', '.join(entry.name for entry in entries)} are: give "
            "each its share, such as 0.7 and 0.3"
        )


def _entry(name: str, value: object) -> SourceEntry:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"a source's name has letters, digits, _, . and -, at most 64: got {name!r}: rename it, as in "
            'web = { path = "web.tokens", weight = 0.7 }'
        )
    if not isinstance(value, dict):
        raise ValueError(
            f'a source must be a table: {name} is {value!r}: write {name} = {{ path = "web.tokens", weight = 0.7 }}'
        )
    for key in value:
        if key not in _KEYS:
            raise ValueError(f"unknown key {name}.{key}: {did_you_mean(key, _KEYS, f'{name}.')}")
    path = value.get("path")
    if not isinstance(path, str) or not path:
        raise ValueError(f'a source must say where it is: {name}.path is {path!r}: give path = "{name}.tokens"')
    held_out = value.get("held_out", "")
    if not isinstance(held_out, str):
        raise ValueError(
            f"a held-out text must be named: {name}.held_out is {held_out!r}: give held_out = "
            f'"{name}-test.tokens", or leave it out'
        )
    weight = _number(name, "weight", value, "its share, such as 0.3")
    epochs = _number(name, "epochs", {"epochs": 1, **value}, "how often it may be read, such as 2, or inf")
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"a weight must be finite and at least 0: {name}.weight is {weight}: give its share, as 0.3")
    if not epochs > 0:
        raise ValueError(
            f"a source may be read some times at most: {name}.epochs is {epochs}: use a number above 0, or inf; to "
            "leave it out of training, weight = 0"
        )
    return SourceEntry(name, path, weight, epochs, held_out)


def _number(name: str, key: str, value: Mapping[str, Any], what: str) -> float:
    number = value.get(key)
    if isinstance(number, bool) or not isinstance(number, int | float) or (abs(number) >= 2**53 and number != math.inf):
        raise ValueError(f"{key} must be a number: {name}.{key} is {number!r}: give {what}")
    return float(number)


@dataclass(frozen=True)
class Mixture:
    """Shares of sources in a sequence of samples without end.

    Attributes:
        weights: of the sources, at least 0, not all 0; they need not add up to 1. A weight counts as the decimal number
            that it is written as.
        seed: key of the order of sources within blocks.
        phase: the phase of a run whose order this is, key of it besides.

    Raises:
        ValueError: other weights, or a source with less than one sample of 2**20.
    """

    weights: tuple[float, ...]
    seed: int
    phase: int = 0

    def __post_init__(self) -> None:
        are_numbers = all(math.isfinite(weight) and weight >= 0 for weight in self.weights)
        if not are_numbers or not any(self.weights):
            raise ValueError(
                f"weights of sources must be finite, at least 0 and not all 0: got {list(self.weights)}: give each its "
                "share, such as 0.7 and 0.3"
            )
        if self._rarest_between * _LARGEST_BLOCK < 1:
            raise ValueError(
                f"all sources but two must give at least one sample of {_LARGEST_BLOCK}: weights {list(self.weights)} "
                f"leave a third {float(self._rarest_between):.1e} of the samples: use weight 0 for it, or leave it out"
            )

    @functools.cached_property
    def shares(self) -> tuple[Fraction, ...]:
        """w_k, which add up to 1."""
        exact = [Fraction(repr(float(weight))) for weight in self.weights]
        total = sum(exact)
        return tuple(weight / total for weight in exact)

    @functools.cached_property
    def _counted(self) -> tuple[int, ...]:
        """The sources in the order in which they are counted: the rarest first, the next one last."""
        rarest = sorted((source for source, share in enumerate(self.shares) if share), key=lambda k: self.shares[k])
        first, last = rarest[:1], rarest[1:2]
        return (*first, *(k for k in range(len(self.shares)) if k not in (*first, *last)), *last)

    @functools.cached_property
    def _rarest_between(self) -> Fraction:
        """The smallest share of those that are counted between the first and the last; 1 if there is none."""
        return min((self.shares[k] for k in self._counted[1:-1] if self.shares[k]), default=Fraction(1))

    @functools.cached_property
    def _bounds(self) -> tuple[int, ...]:
        """0, W_0, W_1, ... of the sources as they are counted, in units of 1 / the last."""
        unit = math.lcm(*(share.denominator for share in self.shares))
        return tuple(accumulate((int(self.shares[k] * unit) for k in self._counted), initial=0))

    @functools.cached_property
    def block(self) -> int:
        """N: samples of a block."""
        size = BLOCK
        while self._rarest_between * size < 1:
            size *= 2
        return size

    @property
    def key(self) -> str:
        """What keys the order of sources within blocks, besides seed and block."""
        return f"sources of a block of phase {self.phase}" if self.phase else "sources of a block"

    def counts_at(self, num_blocks: int) -> tuple[int, ...]:
        """Return how many samples each source has had at the end of a number of blocks."""
        n = num_blocks * self.block
        ends = [bound * n // self._bounds[-1] for bound in self._bounds]
        counts = dict(zip(self._counted, (after - before for before, after in pairwise(ends)), strict=True))
        return tuple(counts[source] for source in range(len(counts)))

    def counts(self, num_samples: int) -> tuple[int, ...]:
        """Return how many of the first samples come from each source."""
        num_blocks, rest = divmod(num_samples, self.block)
        of_rest = np.bincount(_of_block(self, num_blocks)[0][:rest], minlength=len(self.weights)).tolist()
        return tuple(map(sum, zip(self.counts_at(num_blocks), of_rest, strict=True)))

    def place(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each sample, and the sample's number in that source's own sequence.

        Args: samples: int64 [n], numbers in the mixture.
        Returns: sources and numbers, int64 [n]. A source's numbers are 0, 1, 2, ... in the order of its samples.
        Cost: O(sources + N) a block, 120 us for 1,024 samples on an AMD EPYC, once for the samples of a block.
        """
        sources, numbers = np.empty_like(samples), np.empty_like(samples)
        blocks, places = np.divmod(samples, self.block)
        for block in np.unique(blocks).tolist():
            now = blocks == block
            of_block = _of_block(self, block)
            sources[now], numbers[now] = of_block[0][places[now]], of_block[1][places[now]]
        return sources, numbers


@functools.lru_cache(maxsize=_MOST_BLOCKS_CACHED)
def _of_block(mixture: Mixture, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the source of each sample of a block, and its number in that source: a source's numbers ascend."""
    before, after = np.array(mixture.counts_at(block)), np.array(mixture.counts_at(block + 1))
    begins = np.concatenate(([0], np.cumsum(after - before)))
    permuted = permute(np.arange(mixture.block), mixture.block, mixture.seed, block, mixture.key)
    sources = np.searchsorted(begins, permuted, side="right") - 1
    # The samples of each source, in their order: they take its next numbers.
    in_order = np.argsort(sources, kind="stable")
    numbers = np.empty_like(sources)
    numbers[in_order] = np.arange(mixture.block) + (before - begins[:-1])[sources[in_order]]
    return sources, numbers
