"""`tpengine checkpoint ls`: what the indices of a run's checkpoints say. No tensor is read. No torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpengine.checkpoint.directory import CheckpointDirectory
from tpengine.checkpoint.index import CheckpointError, read_index


@dataclass(frozen=True)
class Listed:
    """A checkpoint, or what is left of one.

    Attributes:
        name: of its directory.
        state: "complete", "damaged" or "incomplete" (being written, or left by a killed run).
        age_seconds: since it was last written to.
        step, phase, held_out_loss, num_bytes, layout: of a complete one; None where the index does not say.
    """

    name: str
    state: str
    age_seconds: float
    step: int | None = None
    phase: int | None = None
    held_out_loss: float | None = None
    num_bytes: int | None = None
    layout: str | None = None

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table; a dash where nothing is known."""
        loss = "-" if self.held_out_loss is None else f"{self.held_out_loss:.4f}"
        size = "-" if self.num_bytes is None else f"{self.num_bytes / 1e9:.3f} GB"
        step = self.name if self.step is None else str(self.step)
        phase = "-" if self.phase is None else str(self.phase)
        return step, phase, loss, size, self.layout or "-", self.state, _age(self.age_seconds)


def list_checkpoints(checkpoints: CheckpointDirectory) -> list[Listed]:
    """Return the checkpoints of a run, oldest step first, then what is damaged or incomplete.

    A checkpoint whose index is damaged, or a file of which is missing or cut, is listed as damaged. Hashes are left to
    `verify`. What a running training renames or removes meanwhile is left out.
    """
    found = [_complete(checkpoints.of_step(step), step) for step in checkpoints.steps()]
    for path in checkpoints.unusable():
        state = "damaged" if ".damaged" in path.name else "incomplete"
        found.append(_listed(path, state))
    return [row for row in found if row is not None]


def _complete(path: Path, step: int) -> Listed | None:
    try:
        index = read_index(path)
    except CheckpointError:
        return _listed(path, "damaged", step=step)
    config, data = _object(index.state, "config"), _object(index.state, "data")
    parallel = _object(config, "parallel")
    phase, loss = data.get("phase"), index.state.get("held_out_loss")
    return _listed(
        path,
        "complete",
        step=step,
        # Counted from 1, as in all that is printed.
        phase=phase + 1 if config.get("phases") and isinstance(phase, int) else None,
        held_out_loss=loss if isinstance(loss, float) else None,
        num_bytes=sum(entry.num_bytes for entry in index.files.values()),
        layout=" ".join(f"{axis} {parallel[axis]}" for axis in ("dp", "tp", "pp") if parallel.get(axis)) or None,
    )


def _listed(path: Path, state: str, **known: Any) -> Listed | None:
    try:
        written = path.stat().st_mtime
    except FileNotFoundError:
        return None
    return Listed(path.name, state, max(0.0, time.time() - written), **known)


def _object(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = state.get(name)
    return value if isinstance(value, dict) else {}


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
