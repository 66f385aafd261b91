"""Which checkpoints stay besides the newest: every N-th, the best, and those that a rollback may need. No torch.

The best has the lowest held-out loss of its text: losses on other text, or on other lengths of sequence, do not
compare, so that each order of samples of a run (config/phases.py) has a best one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from tpengine.checkpoint.directory import CheckpointDirectory
from tpengine.checkpoint.index import CheckpointError, read_index_alone

# Held-out loss, and the phase that began the order of samples.
_Judged = tuple[float, int] | None


@dataclass
class Retention:
    """What stays besides the newest.

    Attributes:
        every: those whose step it divides; 0 for none.
        best: whether the best of each text does.
        window: from the newest that is so many steps older than the newest of all; 0 for none.
    """

    every: int = 0
    best: bool = False
    window: int = 0
    _known: dict[int, _Judged] = field(default_factory=dict)

    def __call__(self, directory: CheckpointDirectory) -> set[int]:
        """Return the steps of the complete checkpoints that stay."""
        steps = directory.steps()
        stay = {step for step in steps if self.every and step % self.every == 0}
        if self.best:
            stay |= set(self.best_of(directory))
        if self.window and steps:
            old = [step for step in steps if step <= steps[-1] - self.window]
            stay |= {step for step in steps if step >= (old[-1] if old else 0)}
        return stay

    def remove_others(self, directory: CheckpointDirectory, keep: int, spared: Collection[int] = ()) -> str:
        """Remove the complete checkpoints that do not stay.

        Args:
            keep: how many of the newest stay.
            spared: steps of those that somebody reads now.

        Returns:
            Why one could not be removed, in one line; empty if all were.
        """
        try:
            directory.prune(keep, {*self(directory), *spared})
        except OSError as error:
            place = error.filename or directory.path
            return f"old checkpoints cannot be removed: {place}: {error.strerror}: remove them by hand; the run goes on"
        return ""

    def best_of(self, directory: CheckpointDirectory) -> list[int]:
        """Return the best step of each text, the first of equal ones; what cannot be read has no loss."""
        steps = directory.steps()
        self._known = {step: known for step, known in self._known.items() if step in steps}
        best: dict[int, tuple[float, int]] = {}
        for step in steps:
            if step not in self._known:
                self._known[step] = _judged(directory, step)
            if (judged := self._known[step]) is not None:
                loss, order = judged
                best[order] = min(best.get(order, (loss, step)), (loss, step))
        return sorted(step for _, step in best.values())


def _judged(directory: CheckpointDirectory, step: int) -> _Judged:
    try:
        state = read_index_alone(directory.of_step(step)).state
        loss, data = state.get("held_out_loss"), state.get("data")
    except CheckpointError:
        return None
    order = data.get("order", 0) if isinstance(data, dict) else 0
    if not isinstance(loss, float) or not isinstance(order, int):
        return None
    return loss, order
