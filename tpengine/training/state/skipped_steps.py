"""The list of steps that were skipped because loss or gradient was not finite, and the limit of so many in a row.

    skipped.jsonl    one JSON object per step, on disk as soon as it is skipped:
                     {"step": 13, "counted_from": 1, "samples": [384, 416], "layer": 3, "micro_batch": 1,
                      "tensor": "the gradient of model.layers.3.mlp.up_proj.weight", "loss": "2.25", "grad_norm": "nan"}

Which tensor was not finite first is found by computing the step once more. Until then `tensor` is null; it stays null
if the run ends meanwhile. `samples` is a half-open range of the run's order.
The data of a step is a function of its number, so that a restarted run would meet the same fault again. It leaves the
listed steps out without computing them, and so gets further each time. To have a step computed, remove its line.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from tpengine.config.lengths import index_of, numbered
from tpengine.distributed.agreement import broadcast_json
from tpengine.files import keep_aside, write_beside
from tpengine.observe.activity import Activity
from tpengine.training.planned_run import PlannedRun, RunError
from tpengine.training.state.diagnosis import find_first
from tpengine.training.train_step import TrainStep
from tpengine.training.update.loss_scale import LossScale
from tpengine.training.update.step_result import StepResult

FILE_NAME = "skipped.jsonl"


class SkippedSteps:
    """The skipped steps of a run; the constructor is collective.

    Args:
        planned: the run.
        activity: told what this rank does.
        run_dir: the run's directory on rank 0; None elsewhere. A run that does not continue another keeps an earlier
            list aside.

    Attributes:
        known: the steps that were skipped before this start, 0-based.

    Raises:
        RunError: on all ranks alike: the list cannot be read.
    """

    def __init__(self, planned: PlannedRun, activity: Activity, run_dir: Path | None) -> None:
        self._planned, self._activity, self._train = planned, activity, planned.config.train
        self._path = None if run_dir is None else run_dir / FILE_NAME
        found: dict[str, Any] = {"steps": [], "error": ""}
        if self._path is not None:
            try:
                found["steps"] = self._open(self._path)
            except (OSError, ValueError) as error:
                found["error"] = f"the list of skipped steps must be readable: {self._path}: {error}: mend or remove it"
        found = broadcast_json(found)
        if found["error"]:
            raise RunError(found["error"])
        self.known = frozenset(found["steps"])
        self._skipped = set(self.known)
        self._in_a_row: list[int] = []

    def leaves_out(self, step: int) -> bool:
        """Return whether a step is to be left out, as it was skipped before this start; equal on all ranks."""
        return step in self.known

    def num_until(self, step: int) -> int:
        """Return how many steps up to and including this one were skipped, in this start and before."""
        return sum(skipped <= step for skipped in self._skipped)

    def note(self, step: int, result: StepResult, train_step: TrainStep) -> None:
        """Note a step that has been computed; if it was skipped, find out why and write it down. Collective.

        A step whose gradient overflowed with its loss scale is none of these: the scale has halved since.

        Args:
            step, result: its number, and what came of it.
            train_step: has run it.

        Raises:
            RunError: on all ranks alike: --train.nonfinite-steps steps in a row were skipped.
        """
        if not result.skipped or result.spiked:
            self._in_a_row = []
        if not result.is_not_finite:
            return
        train = self._train
        phase = self._planned.phases.at(step)
        self._skipped.add(step)
        self._in_a_row.append(step)
        record = {
            **numbered(step),
            "samples": [phase.samples_before(step), phase.samples_before(step + 1)],
            "tensor": None,
            "layer": None,
            "micro_batch": None,
            "seen_again": None,
            "loss": str(result.loss),
            "grad_norm": str(result.grad_norm),
        }
        # Write at once: the run may end while the reason is sought.
        self._write_while_all_wait(record, f"a restart meets step {step + 1} again")
        # Find the first tensor that is not finite, and write it into the step's line.
        self._activity.begin("finding what is not finite")
        first = find_first(train_step, step)
        found = {
            "tensor": first.tensor,
            "layer": first.layer,
            "micro_batch": first.micro_batch,
            "seen_again": first.again,
        }
        self._write_while_all_wait({**record, **found}, f"it does not say what was first in step {step + 1}")
        numbers = f"loss {result.loss:.6g}, gradient norm {result.grad_norm:.6g}"
        if self._path is not None:
            self._say(f"step {step + 1} is skipped, its update is not finite: {numbers}, first {first}")
        if len(self._in_a_row) >= train.nonfinite_steps:
            steps = ", ".join(str(skipped + 1) for skipped in self._in_a_row[-train.nonfinite_steps :])
            raise RunError(
                f"updates must be finite: those of steps {steps}, --train.nonfinite-steps {train.nonfinite_steps} in a "
                f"row, were not{_scale_in_words(train_step.state.loss_scale)}; in the last {numbers}, first {first}: "
                "lower --optim.lr or lengthen --optim.warmup-steps; --resume goes on without these steps"
            )

    def go_back(self, num_steps: int) -> None:
        """Forget the skipped steps from `num_steps` on, because the run repeats them, some with other samples."""
        self.known = frozenset(step for step in self.known if step < num_steps)
        gone = {step for step in self._skipped if step >= num_steps}
        self._skipped -= gone
        self._in_a_row = []
        if not gone or self._path is None or not self._path.exists():
            return
        try:
            lines = [line for line in self._path.read_bytes().splitlines() if _step_of(line) not in gone]
            write_beside(self._path, b"".join(line + b"\n" for line in lines), durable=True)
        except OSError as error:
            self._say(f"{self._path} cannot be written: {error}: it lists steps that the run repeats: remove them")

    def _open(self, path: Path) -> list[int]:
        """Return the steps listed by the run that this one continues; keep the list of another run aside."""
        if not self._planned.config.resume:
            keep_aside(path)
            return []
        if not path.exists():
            return []
        lines = path.read_bytes().splitlines(keepends=True)
        # A last line that is cut off is dropped: its step will be computed again.
        if lines and not lines[-1].endswith(b"\n") and _step_of(lines[-1]) is None:
            lines.pop()
        steps = []
        for number, line in enumerate(lines, 1):
            step = _step_of(line)
            if step is None:
                raise ValueError(f"line {number} names no step")
            steps.append(step)
        return steps

    def _write_while_all_wait(self, record: dict[str, Any], without: str) -> None:
        """Write a step's line on rank 0; collective. All ranks wait without a time limit, as the disk may be slow."""
        self._activity.begin("writing what is not finite", timed=False)
        self.write(record, without)
        broadcast_json()

    def write(self, record: dict[str, Any], without: str) -> None:
        """Write a step's line, replacing an earlier line of the step; the file is replaced whole.

        Args:
            record: the line.
            without: the consequence to print if it cannot be written.
        """
        if self._path is None:
            return
        try:
            lines = self._path.read_bytes().splitlines() if self._path.exists() else []
            if lines and _step_of(lines[-1]) in (None, index_of(record)):
                lines.pop()
            lines.append(json.dumps(record).encode())
            write_beside(self._path, b"".join(line + b"\n" for line in lines), durable=True)
        except OSError as error:
            self._say(f"{self._path} cannot be written: {error}: {without}")

    @staticmethod
    def _say(line: str) -> None:
        with contextlib.suppress(OSError):
            print(f"tpengine: {line}", file=sys.stderr, flush=True)


def _scale_in_words(scale: LossScale) -> str:
    return f", with the loss scale at its floor, {scale.value:g}" if scale.is_at_floor else ""


def _step_of(line: bytes) -> int | None:
    try:
        return index_of(json.loads(line))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
