"""The training program on a text with bad labels, and with an accident during a rollback.

In the environment: `BAD=100:102,160:162` scrambles the labels of these samples, by their numbers in the order of phase
0, whatever step reads them; `BAD=1/10:12` those of the order that phase 1 began. `ACCIDENT=<where>:<signal>:<rank>`
sends a rank a signal when its first rollback is there:

    loaded     the checkpoint has been loaded, nothing else is done
    removed    newer checkpoints are removed, the list is not written
    listed     the list is written
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpengine.config import IGNORED_LABEL
from tpengine.data import Samples
from tpengine.runs.spike_answers import SpikeAnswers
from tpengine.train import main

# Of a byte's vocabulary: far from what text has in the place of a letter.
_SHIFT = 100


def scramble(bad: str) -> Callable[[], None]:
    """Scramble the labels of training samples, as BAD says; return what undoes it."""
    read = Samples.read_with_starts
    order, _, ranges = bad.rpartition("/")
    numbers = [number for part in ranges.split(",") for number in range(*map(int, part.split(":")))]

    def spoilt(self: Samples, samples: NDArray[np.int64]) -> Any:
        tokens, labels, starts = read(self, samples)
        if self.seed is not None and self.phase == int(order or 0):
            for row in np.flatnonzero(np.isin(samples, numbers)):
                valid = labels[row] != IGNORED_LABEL
                labels[row, valid] = (labels[row, valid] + _SHIFT) % self.vocab_size
        return tokens, labels, starts

    Samples.read_with_starts = spoilt  # type: ignore[method-assign]

    def undo() -> None:
        Samples.read_with_starts = read  # type: ignore[method-assign]

    return undo


def plan_accident(accident: str) -> None:
    """Send this rank a signal when it has come to a place of a rollback."""
    where, number, rank = accident.split(":")
    if rank != os.environ.get("RANK", "0"):
        return
    # What has been done before the call, or after it.
    name, is_before = {"loaded": ("_remove_newer", True), "removed": ("_write", True), "listed": ("_write", False)}[
        where
    ]
    method = getattr(SpikeAnswers, name)

    def call(self: SpikeAnswers, *args: Any) -> Any:
        if is_before:
            os.kill(os.getpid(), int(number))
        result = method(self, *args)
        if not is_before:
            os.kill(os.getpid(), int(number))
        return result

    setattr(SpikeAnswers, name, call)


if __name__ == "__main__":
    if os.environ.get("BAD"):
        scramble(os.environ["BAD"])
    if os.environ.get("ACCIDENT"):
        plan_accident(os.environ["ACCIDENT"])
    main()
