"""Steps whose update is left out because it is not finite: which they are, and when there are too many in a row.

    skipped.jsonl    one JSON object a step, on disk before the next step ends:
                     {"step": 12, "samples": [384, 416], "tensor": "the gradient of model.layers.3.mlp.up_proj.weight",
                      "layer": 3, "micro_batch": 1, "loss": "2.25", "grad_norm": "nan"}

Steps count from 0 there, as in metrics.jsonl; `samples` is a half-open range of the run's order. The data of a step is
a function of its number, so a run that starts again would meet the same step: it leaves the listed ones out, without
computing them, and gets further each time. Who wants them computed removes their lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from tpengine.distributed.messages import broadcast_json
from tpengine.observe.metrics import keep_aside
from tpengine.training.state.diagnosis import find_first
from tpengine.training.trainer import RunError, StepResult, Trainer

FILE_NAME = "skipped.jsonl"


class SkippedSteps:
    """The steps of a run that are left out; the constructor is collective.

    Args:
        trainer: whose steps.
        run_dir: the run's directory on rank 0; None elsewhere. A run that does not continue another keeps its list
            aside.

    Attributes:
        known: the steps that were skipped before this start, 0-based.

    Raises:
        RunError: on all ranks alike: the list cannot be read.
    """

    def __init__(self, trainer: Trainer, run_dir: Path | None) -> None:
        self._trainer, self._train = trainer, trainer.config.train
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
        """Whether a step is not to be computed; equal on all ranks."""
        return step in self.known

    def num_until(self, step: int) -> int:
        """How many steps up to and with this one have been skipped, in this start and before."""
        return sum(skipped <= step for skipped in self._skipped)

    def note(self, step: int, result: StepResult) -> None:
        """Count a step that has been computed; if it was skipped, find out why and write it down. Collective.

        Raises:
            RunError: on all ranks alike: as many in a row as --train.nonfinite-steps says.
        """
        if not result.skipped:
            self._in_a_row = []
            return
        self._trainer.activity.begin("finding what is not finite")
        first = find_first(self._trainer, step)
        train = self._train
        num_samples = train.micro_batch_size * train.num_micro_batches * self._trainer.mesh.shape.dp
        self._skipped.add(step)
        self._in_a_row.append(step)
        samples = [step * num_samples, (step + 1) * num_samples]
        numbers = f"loss {result.loss:.6g}, gradient norm {result.grad_norm:.6g}"
        if self._path is not None:
            self._write(
                {
                    "step": step,
                    "samples": samples,
                    "tensor": first.tensor,
                    "layer": first.layer,
                    "micro_batch": first.micro_batch,
                    "seen_again": first.again,
                    "loss": str(result.loss),
                    "grad_norm": str(result.grad_norm),
                }
            )
            self._say(f"step {step + 1} is skipped, its update is not finite: {numbers}, first {first}")
        if len(self._in_a_row) >= train.nonfinite_steps:
            steps = ", ".join(str(skipped + 1) for skipped in self._in_a_row[-train.nonfinite_steps :])
            raise RunError(
                f"updates must be finite: those of steps {steps}, --train.nonfinite-steps {train.nonfinite_steps} in a "
                f"row, were not; in the last {numbers}, first {first}: lower --optim.lr or lengthen "
                "--optim.warmup-steps; --resume goes on without these steps"
            )

    def _open(self, path: Path) -> list[int]:
        """Read the list of the run that this one continues, or put another's aside."""
        if not self._trainer.config.resume:
            keep_aside(path)
            return []
        if not path.exists():
            return []
        # A last line that a kill has cut is of a step that is met again.
        whole, _, cut = path.read_bytes().rpartition(b"\n")
        if cut:
            os.truncate(path, len(whole) + bool(whole))
        steps = []
        for number, line in enumerate(whole.splitlines(), 1):
            step = _step_of(line)
            if step is None:
                raise ValueError(f"line {number} names no step")
            steps.append(step)
        return steps

    def _write(self, record: dict[str, Any]) -> None:
        assert self._path is not None
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._say(f"{self._path} cannot be written: {error}: a restart meets step {record['step'] + 1} again")

    @staticmethod
    def _say(line: str) -> None:
        with contextlib.suppress(OSError):
            print(f"tpengine: {line}", file=sys.stderr, flush=True)


def _step_of(line: bytes) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if type(step) is int and step >= 0 else None
