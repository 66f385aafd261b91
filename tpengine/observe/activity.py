"""What this rank is doing now, in one plain field, for whoever must report a rank that is stuck or dying. No torch.

The main thread writes, the watch's thread reads (watch.py). One assignment of one object needs no lock, and costs a
microsecond an action.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Doing:
    """One thing a rank does.

    Attributes:
        what: an action of the plan, or words for what lies between plans ("counting its targets").
        began_at: time.monotonic, in seconds.
        timed: whether the time limit applies to it. Writing a checkpoint takes as long as the disk does.
    """

    what: object
    began_at: float
    timed: bool


class Activity:
    """What a rank does, step by step.

    Attributes:
        now: the present thing.
        step: the optimizer step under way; None before the first.
        longest_seconds: how long the longest timed thing of a step took that has ended.
    """

    def __init__(self) -> None:
        self.now = Doing("starting", time.monotonic(), timed=False)
        self.step: int | None = None
        self.longest_seconds = 0.0

    def begin(self, what: object, *, timed: bool = True) -> None:
        """End the present thing and begin the next."""
        now, last = time.monotonic(), self.now
        if last.timed and self.step is not None:  # what ranks wait for when they start is no measure of a step
            self.longest_seconds = max(self.longest_seconds, now - last.began_at)
        self.now = Doing(what, now, timed)
