"""What `tpengine certify` compares: digests of what ranks computed, or how far fast mode is from exact mode. No torch.

**Bits** (StepEvidence). Every observation has a place. It says what was observed, not which rank made it: a layer's
output for a block of tokens, the gradient that one shard of exact mode added up over a block of micro-batches, a shard
of a weight. So runs in different layouts have the same places. Places are ordered by cause: the forwards of a step come
before its backwards, backwards run from the output head down, and sums, the gradient norm and the update follow. So the
first place that differs is nearest to the cause.

**Distances** (Distances), per tensor, in roundings of the dtype:

    distance(a, b) = |a - b| / (u |b|)      Euclidean norms; u = half the gap between 1 and the next number of the dtype

The bound is measured, not guessed: exact mode runs once more in float64 from the same weights, and

    distance(fast, exact) <= 3 * distance(exact, float64)

By the triangle inequality it holds if fast mode is at most twice as inexact as exact mode. TTrace (arXiv 2506.09280,
section 5) estimates how far rounding can move a tensor by perturbing the inputs by u; it too needs a factor between the
effect of one perturbation and that of many roundings. Here the roundings themselves are measured, on the very tensor
and data that are compared. The bound cannot detect an error smaller than itself: about 1e-6 of a tensor in float32,
some per cent in bfloat16 (`Distance.noticed_from`). Exact mode can.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FACTOR = 3.0
# Unit roundoff: half the gap between 1 and the next larger number.
_ROUNDOFF: Mapping[str, float] = {"bfloat16": 2.0**-8, "float32": 2.0**-24}


class StepPhase(IntEnum):
    """What a step does, in order."""

    FORWARD = 0
    BACKWARD = 1
    SUM = 2
    UPDATE = 3


@dataclass(frozen=True, order=True)
class ObservedPlace:
    """What is observed; places are ordered by cause.

    Attributes:
        step: 0-based.
        phase: of the step.
        microbatch: counted over all replicas; -1 for what belongs to all micro-batches.
        depth: position within the phase: from the embedding up, in backward from the head down.
        name: of the tensor.
        shard: the shard of exact mode that it belongs to; -1 for what is whole.
    """

    step: int
    phase: StepPhase
    microbatch: int
    depth: int
    name: str
    shard: int

    def __str__(self) -> str:
        parts = [f"step {self.step + 1}: {self.name}"]
        if self.microbatch >= 0:
            parts.append(f"micro-batch {self.microbatch}")
        if self.shard >= 0:
            parts.append(f"shard {self.shard}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Observation:
    """What one rank computed at one place.

    Attributes:
        place: what was observed.
        digest: SHA-256 of its bytes, in hex.
        action: the action of the plan that made it.
    """

    place: ObservedPlace
    digest: str
    action: str


@dataclass(frozen=True)
class Seen:
    """An observation and the rank that made it."""

    digest: str
    action: str
    rank: int


@dataclass(frozen=True)
class Difference:
    """One place at which two runs differ, or that only one side has (the other is None)."""

    place: ObservedPlace
    left: Seen | None
    right: Seen | None


class StepEvidence:
    """Everything that the ranks of one run computed in one step.

    Args:
        by_rank: observations of each rank.

    Attributes:
        seen: by place; if several ranks observed a place, the first of them.
        disagreement: the first place at which two ranks of this run differ, or None.
    """

    def __init__(self, by_rank: Sequence[Iterable[Observation]]) -> None:
        self.seen: dict[ObservedPlace, Seen] = {}
        conflicts: list[Difference] = []
        for rank, observations in enumerate(by_rank):
            for seen in observations:
                mine = Seen(seen.digest, seen.action, rank)
                first = self.seen.setdefault(seen.place, mine)
                if first.digest != mine.digest:
                    conflicts.append(Difference(seen.place, first, mine))
        self.disagreement = min(conflicts, key=lambda conflict: conflict.place, default=None)

    def first_difference(self, other: StepEvidence) -> Difference | None:
        """Return the first place, by cause, at which the two runs differ."""
        for place in sorted(self.seen.keys() | other.seen.keys()):
            left, right = self.seen.get(place), other.seen.get(place)
            if left is None or right is None or left.digest != right.digest:
                return Difference(place, left, right)
        return None

    def groups(self) -> Mapping[str, str]:
        """Return one SHA-256 per group of tensors: of the names, shards and digests of its tensors, in order."""
        members: dict[str, list[ObservedPlace]] = defaultdict(list)
        for place in self.seen:
            if place.phase >= StepPhase.SUM and (group := group_of(place.name)):
                members[group].append(place)
        digests = {}
        for group in GROUPS:
            text = "\n".join(f"{p.name} {p.shard} {self.seen[p].digest}" for p in sorted(members[group]))
            digests[group] = hashlib.sha256(text.encode()).hexdigest()
        return digests


GROUPS = ("weights", "gradients", "optimizer")
GRADIENT, WEIGHT, OPTIMIZER = "summed gradient of ", "weight ", "optimizer's "


def group_of(name: str) -> str | None:
    """Return the group of a tensor, by its name; None if it belongs to none."""
    for prefix, group in ((WEIGHT, "weights"), (GRADIENT, "gradients"), (OPTIMIZER, "optimizer")):
        if name.startswith(prefix):
            return group
    return None


class TensorBlock(Protocol):
    """A block of a global tensor; see witness.Values."""

    @property
    def name(self) -> str: ...
    @property
    def offset(self) -> tuple[int, ...]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def values(self) -> NDArray[np.float64]: ...


Tensors = dict[str, NDArray[np.float64]]


class ReplicasDiffer(Exception):
    """Ranks that hold the same block hold different values; the message names the tensor."""


def assembled(parts: Iterable[TensorBlock]) -> Tensors:
    """Assemble blocks into global tensors.

    Raises:
        ReplicasDiffer: several ranks hold a block with different bits; fast mode, too, promises equal bits.
    """
    whole: Tensors = {}
    for part in parts:
        tensor = whole.setdefault(part.name, np.full(part.shape, np.nan))
        place = tuple(slice(o, o + n) for o, n in zip(part.offset, part.values.shape, strict=True))
        before = tensor[place]
        known = ~np.isnan(before)
        if not np.array_equal(before[known], part.values[known]):
            raise ReplicasDiffer(part.name)
        tensor[place] = part.values
    return whole


@dataclass(frozen=True)
class Distance:
    """The distances of one tensor, over all steps.

    Attributes:
        name: of the tensor.
        of_fast: distance of fast mode to exact, in roundings.
        of_exact: distance of exact mode to float64, in roundings.
        roundoff: one rounding, relative.
    """

    name: str
    of_fast: float
    of_exact: float
    roundoff: float = 1.0

    @property
    def bound(self) -> float:
        """Return the largest `of_fast` that is allowed."""
        return FACTOR * self.of_exact

    @property
    def noticed_from(self) -> float:
        """Return the relative error of the whole tensor above which the bound is surely exceeded."""
        return (self.bound + self.of_fast) * self.roundoff

    @property
    def holds(self) -> bool:
        """Return whether the bound holds; with a NaN it does not."""
        return self.of_fast <= self.bound

    @property
    def share(self) -> float:
        """Return `of_fast` as a share of the bound; 0 where nothing differs."""
        if self.of_fast == 0:
            return 0.0
        return self.of_fast / self.bound if self.bound else float("inf")


class Distances:
    """Sums of squares over steps, for the distances of all tensors.

    Args:
        dtype: whose roundings are the unit: float32 or bfloat16.
    """

    def __init__(self, dtype: str) -> None:
        self._roundoff = _ROUNDOFF[dtype]
        self._squares: dict[str, NDArray[np.float64]] = defaultdict(lambda: np.zeros(4))

    def add(self, fast: Tensors, exact: Tensors, wide: Tensors) -> None:
        """Add one step: the same tensors of fast mode, of exact mode, and of exact mode in float64."""
        assert fast.keys() == exact.keys() == wide.keys(), sorted(fast.keys() ^ exact.keys())
        for name, reference in wide.items():
            # The padding of the vocabulary depends on tp; it has no gradient, so it is cut off.
            rows = slice(0, min(len(t[name]) for t in (fast, exact, wide)))
            f, e, w = fast[name][rows], exact[name][rows], reference[rows]
            self._squares[name] += [_square(f - e), _square(e), _square(e - w), _square(w)]

    def of_tensors(self) -> list[Distance]:
        """Return the distances, in the tensors' order."""
        found = []
        for name, (fast, exact, wrong, wide) in self._squares.items():
            found.append(Distance(name, self._roundings(fast, exact), self._roundings(wrong, wide), self._roundoff))
        return found

    def _roundings(self, difference: float, size: float) -> float:
        """Return a difference in roundings; infinite for any difference from a tensor that is zero everywhere."""
        if size == 0:
            return float("inf") if difference else 0.0
        return float(np.sqrt(difference / size)) / self._roundoff


def _square(x: NDArray[np.float64]) -> float:
    return float(np.vdot(x, x))
