"""Who holds the processors of one rank's GPU: as a GPU does, it gives to whoever can begin what is free, for good.

A kernel's programs take processors as these get free, and keep them until the kernel ends, whether they wait or work.
Between kernels of several streams a GPU promises no order. Here a seed chooses one of six, in which kernels that
compute, operations of NCCL and kernels that copy come first, second and last, or a new one each time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from support.nccl.program import COMPUTE, COPIES

# Names of streams, "" for all others: those of communicators.
ORDERS = tuple(itertools.permutations((COMPUTE, COPIES, "")))
NUM_SEEDS = len(ORDERS) + 1


@dataclass
class Processors:
    """The processors of one rank.

    Args:
        total: how many there are.
        seed: chooses who comes first.

    Attributes:
        free: that nobody holds.
        held: by whom, how many.
    """

    total: int
    seed: int
    free: int = field(init=False)
    held: dict[Hashable, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free, self._chance = self.total, random.Random(self.seed)
        self._firsts = ORDERS[self.seed % NUM_SEEDS] if self.seed % NUM_SEEDS < len(ORDERS) else None

    def in_some_order(self, streams: Iterable[str]) -> list[str]:
        """Return the streams as they get processors."""
        found = list(streams)
        self._chance.shuffle(found)
        if self._firsts is None:
            return found
        places = {name: place for place, name in enumerate(self._firsts)}
        return sorted(found, key=lambda name: places.get(name, places[""]))

    def take(self, who: Hashable, processors: int, least: int) -> bool:
        """Take what is free up to `processors`; return whether he has `least` now."""
        assert least <= self.total, f"{least} processors of {self.total}"
        had = self.held.get(who, 0)
        if had >= least:
            return True
        # Who can begin with one takes all he has use for. Who needs some at once keeps those that he could get.
        got = min(processors - had, self.free)
        self.free -= got
        if had + got:
            self.held[who] = had + got
        return had + got >= least

    def give(self, who: Hashable) -> None:
        """Return what he holds."""
        self.free += self.held.pop(who, 0)
