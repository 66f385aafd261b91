"""What the ranks of a run computed, as digests in causal order, and the first difference between two runs. No torch.

Every observation has a place. It says what was observed, not which rank made it: a layer's output for a block of
tokens, the gradient that one shard of exact mode added up over a block of micro-batches, a shard of a weight. So runs
in different layouts have the same places. Places are ordered by cause: the forwards of a step come before its
backwards, backwards run from the output head down, and sums, the gradient norm and the update follow. So the first
place that differs is nearest to the cause.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum


class Phase(IntEnum):
    """What a step does, in order."""

    FORWARD = 0
    BACKWARD = 1
    SUM = 2
    UPDATE = 3


@dataclass(frozen=True, order=True)
class Place:
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
    phase: Phase
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

    place: Place
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

    place: Place
    left: Seen | None
    right: Seen | None


class Evidence:
    """Everything that the ranks of one run computed in one step.

    Args:
        by_rank: observations of each rank.

    Attributes:
        seen: by place; if several ranks observed a place, the first of them.
        disagreement: the first place at which two ranks of this run differ, or None.
    """

    def __init__(self, by_rank: Sequence[Iterable[Observation]]) -> None:
        self.seen: dict[Place, Seen] = {}
        conflicts: list[Difference] = []
        for rank, observations in enumerate(by_rank):
            for seen in observations:
                mine = Seen(seen.digest, seen.action, rank)
                first = self.seen.setdefault(seen.place, mine)
                if first.digest != mine.digest:
                    conflicts.append(Difference(seen.place, first, mine))
        self.disagreement = min(conflicts, key=lambda conflict: conflict.place, default=None)

    def first_difference(self, other: Evidence) -> Difference | None:
        """Return the first place, by cause, at which the two runs differ."""
        for place in sorted(self.seen.keys() | other.seen.keys()):
            left, right = self.seen.get(place), other.seen.get(place)
            if left is None or right is None or left.digest != right.digest:
                return Difference(place, left, right)
        return None

    def groups(self) -> Mapping[str, str]:
        """Return one SHA-256 per group of tensors: of the names, shards and digests of its tensors, in order."""
        members: dict[str, list[Place]] = defaultdict(list)
        for place in self.seen:
            if place.phase >= Phase.SUM and (group := group_of(place.name)):
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
