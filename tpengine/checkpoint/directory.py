"""The checkpoints of a run: one directory per step, written beside and renamed; and which of them stay. No torch.

<run_dir>/checkpoints/step-00000050/    complete: it was renamed to this once everything was on disk
<run_dir>/checkpoints/.step-00000100.writing/   being written, or left by a run that was killed
<run_dir>/checkpoints/step-00000050.damaged/    was complete and has changed since; never used or deleted

The newest stay, every N-th, the best, and those that a rollback may need. The best has the lowest held-out loss of its
text: losses on other text, or on other lengths of sequence, do not compare, so that each order of samples of a run
(config/phases.py) has a best one.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from tpengine.checkpoint.index import CheckpointError, read_index_alone
from tpengine.files import sync_directory

# As `of_step` spells a number, and no other way.
_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")
# Held-out loss, and the phase that began the order of samples.
_Judged = tuple[float, int] | None


class CheckpointDirectory:
    """The checkpoints of one run.

    Args:
        path: <run_dir>/checkpoints; need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def of_step(self, step: int) -> Path:
        """Return where the checkpoint after `step` optimizer steps is, or will be."""
        return self.path / f"step-{step:08}"

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first."""
        if not self.path.is_dir():
            return []
        matches = [_NAME.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir()]
        return sorted(int(match[1]) for match in matches if match)

    def unusable(self) -> list[Path]:
        """Return what is there beside the complete checkpoints: being written, left by a killed run, or damaged."""
        if not self.path.is_dir():
            return []
        found = [entry for entry in self.path.iterdir() if entry.name.startswith((".step-", "step-"))]
        return sorted(entry for entry in found if _NAME.fullmatch(entry.name) is None)

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint."""
        steps = self.steps()
        return self.of_step(steps[-1]) if steps else None

    def begin(self, step: int) -> Path:
        """Return the place to write a checkpoint to; any rank may be the first to create it."""
        beside = self._beside(step)
        beside.mkdir(parents=True, exist_ok=True)
        return beside

    def complete(self, step: int) -> None:
        """Rename what was written to its final name, durably.

        If there is a complete checkpoint of the same step, it has the same content and stays: replacing it would take
        two renames, and a kill between them would leave neither.
        """
        beside, final = self._beside(step), self.of_step(step)
        if final.exists():
            self.abandon(step)
        else:
            sync_directory(beside)
            beside.rename(final)
        sync_directory(self.path)

    def abandon(self, step: int) -> None:
        """Remove what was written of a checkpoint that cannot be completed."""
        shutil.rmtree(self._beside(step), ignore_errors=True)

    def set_aside(self, step: int) -> Path:
        """Rename a damaged checkpoint, so that it is not among `steps` and its step can be saved again.

        Returns:
            Its new name, step-<n>.damaged or, where there is one, step-<n>.damaged-2 and so on.
        """
        damaged = self.of_step(step)
        aside = damaged.with_name(f"{damaged.name}.damaged")
        number = 1
        while os.path.lexists(aside):
            number += 1
            aside = damaged.with_name(f"{damaged.name}.damaged-{number}")
        damaged.rename(aside)
        sync_directory(self.path)
        return aside

    def prune(self, keep: int, besides: Collection[int] = ()) -> None:
        """Remove all complete checkpoints but the newest `keep` and those of the steps `besides`."""
        for step in self.steps()[:-keep]:
            if step not in besides:
                self._remove(self.of_step(step))

    def remove_after(self, step: int) -> None:
        """Remove all complete checkpoints of later steps, the newest first, so that a kill leaves the older ones."""
        for later in reversed(self.steps()):
            if later > step:
                self._remove(self.of_step(later))
        if self.path.is_dir():
            sync_directory(self.path)

    def clean(self) -> None:
        """Remove what killed runs have left partly written or partly removed."""
        if self.path.is_dir():
            for entry in self.path.iterdir():
                if entry.name.startswith(".step-"):
                    shutil.rmtree(entry, ignore_errors=True)

    def _beside(self, step: int) -> Path:
        return self.path / f".step-{step:08}.writing"

    def _remove(self, checkpoint: Path) -> None:
        """Rename first, then remove, so that a kill leaves nothing that looks complete."""
        aside = checkpoint.with_name(f".{checkpoint.name}.removing")
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


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
