"""What this rank is doing now, in one field, for reports about a rank that is stuck or dying. No torch.

The main thread writes it and the watch's thread reads it (watch.py). Assigning one object needs no lock, and costs a
microsecond per action.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Doing:
    """One thing a rank does.

    Attributes:
        what: an action of the plan, or words for what happens between plans ("counting its targets").
        began_at: time.monotonic, in seconds.
        timed: whether the time limit applies. It does not apply to writing a checkpoint, which takes as long as the
            disk takes.
    """

    what: object
    began_at: float
    timed: bool


class Activity:
    """What a rank does, one thing after another.

    Attributes:
        now: what it is doing.
        step: the optimizer step under way; None before the first.
        longest_seconds: the longest time that a finished timed thing of a step has taken.
    """

    def __init__(self) -> None:
        self.now = Doing("starting", time.monotonic(), timed=False)
        self.step: int | None = None
        self.longest_seconds = 0.0

    def begin(self, what: object, *, timed: bool = True) -> None:
        """End the current thing and begin the next."""
        now, last = time.monotonic(), self.now
        if last.timed and self.step is not None:  # waits at the start say nothing about the length of a step
            self.longest_seconds = max(self.longest_seconds, now - last.began_at)
        self.now = Doing(what, now, timed)
