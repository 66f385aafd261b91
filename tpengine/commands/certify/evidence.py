"""What the ranks of a run saw, as digests in causal order, and the first thing that two runs saw differently. No torch.

Every observation has a place that says what it is of, and not who made it: a layer's output for a block of tokens, the
gradient that a virtual rank added up over a block of micro-batches, a shard of a weight. So runs in different layouts
have the same places. Places are ordered by cause: forwards of a step come before its backwards, backwards run from the
output head down, and sums, the gradient norm and the update follow. The first place that differs names the culprit.
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
    """What is observed; places compare by cause.

    Attributes:
        step: 0-based.
        phase: of the step.
        microbatch: counted over all replicas; -1 for what belongs to all.
        depth: within the phase: from the embedding up, in backward from the head down.
        name: of the tensor.
        shard: the virtual rank it belongs to; -1 for what is whole.
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
    """What one rank saw.

    Attributes:
        place: of what.
        digest: SHA-256 of its bytes, in hex.
        action: of the plan, that had made it.
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
    """One place that was seen differently, or by one side only (None)."""

    place: Place
    left: Seen | None
    right: Seen | None


class Evidence:
    """Everything that the ranks of one run saw in one step.

    Args:
        by_rank: observations of each rank.

    Attributes:
        seen: by place; of ranks that saw the same place, the first.
        disagreement: the first place that two ranks of this run saw differently, or None.
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
        """The first place, by cause, that the two runs saw differently."""
        for place in sorted(self.seen.keys() | other.seen.keys()):
            left, right = self.seen.get(place), other.seen.get(place)
            if left is None or right is None or left.digest != right.digest:
                return Difference(place, left, right)
        return None

    def groups(self) -> Mapping[str, str]:
        """One SHA-256 for each group of tensors: of the names, shards and digests of its tensors, in their order."""
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
    """The group of a tensor by its name; None for what belongs to none."""
    for prefix, group in ((WEIGHT, "weights"), (GRADIENT, "gradients"), (OPTIMIZER, "optimizer")):
        if name.startswith(prefix):
            return group
    return None
