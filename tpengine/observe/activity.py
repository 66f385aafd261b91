"""What this rank is doing now, and whom it may wait for: what a report about a stuck or dying rank needs. No torch.

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


class OtherRanks:
    """What a rank knows of those that it waits for; this one knows nothing. Any thread may call it."""

    def waits(self, what: object) -> bool:
        """Return whether an activity can only end if other ranks act; a rank that computes is never given up."""
        return True

    def explain(self, what: object) -> str:
        """Return in words for a report what an activity waits for: ", waiting for rank 3 (pp)"."""
        return ""

    def keep(self, reason: str, doing: Doing, polls_no_peer: bool) -> None:
        """Keep the same where it is found later; may raise, and may block.

        Args:
            reason: why this rank leaves.
            doing: the activity that it leaves.
            polls_no_peer: whether the main thread is seen to wait for no peer's memory.
        """


class Activity:
    """What a rank does, one thing after another.

    Attributes:
        now: what it is doing.
        step: the optimizer step under way; None before the first.
        longest_seconds: the longest time that a finished timed thing of a step has taken.
        timeout_seconds: the longest time that a timed thing may take; 0 for no limit.
        stoppable: whether the training loop is running and will look for a request to stop. If there is none who looks,
            a signal ends the process at once with 128 + its number.
        last_checkpoint: end of rank 0's line when an interrupt ends it at once, once nothing is lost by that: which
            checkpoint is left.
        ranks: what is known of the other ranks.
    """

    def __init__(self) -> None:
        self.now = Doing("starting", time.monotonic(), timed=False)
        self.step: int | None = None
        self.longest_seconds = self.timeout_seconds = 0.0
        self.stoppable = False
        self.last_checkpoint = ""
        self.ranks = OtherRanks()

    def begin(self, what: object, *, timed: bool = True) -> None:
        """End the current thing and begin the next."""
        now, last = time.monotonic(), self.now
        if last.timed and self.step is not None:  # waits at the start say nothing about the length of a step
            self.longest_seconds = max(self.longest_seconds, now - last.began_at)
        self.now = Doing(what, now, timed)
