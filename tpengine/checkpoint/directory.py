"""The checkpoints of a run: one directory per step, written beside and renamed; the newest are kept. No torch.

<run_dir>/checkpoints/step-00000050/    complete: it was renamed to this once everything was on disk
<run_dir>/checkpoints/.step-00000100.writing/   being written, or left by a run that was killed
<run_dir>/checkpoints/step-00000050.damaged/    was complete and has changed since; never used or deleted
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from tpengine.files import sync_directory

# As `of_step` spells a number, and no other way.
_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})")


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
