"""How long the steps that are left will take, judged by those that have been taken. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

# The first steps of a start load kernels, prepare weights and fill caches: what they take says nothing of the others.
_STARTING_STEPS = 2
# An evaluation or a checkpoint that comes every so many steps has its share.
_RECENT_STEPS = 100
_SHORT_SECONDS = 100


class Pace:
    """Estimates the rest of a run from the wall time of its last steps."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)

    def add(self, record: Mapping[str, Any]) -> None:
        """Take a row of metrics; a step that was left out takes no time, and does not count."""
        seconds = record.get("wall_seconds", record.get("step_seconds"))
        if seconds is None:
            return
        self._num_seen += 1
        if self._num_seen > _STARTING_STEPS:
            self._recent.append(seconds)

    def left(self, num_steps: int) -> str:
        """Return how long so many steps will take, in words; empty while only first steps are known."""
        if not num_steps:
            return "0 s left"
        if not self._recent:
            return ""
        seconds = num_steps * sum(self._recent) / len(self._recent)
        return f"{seconds:.0f} s left" if seconds < _SHORT_SECONDS else f"{timedelta(seconds=round(seconds))} left"
