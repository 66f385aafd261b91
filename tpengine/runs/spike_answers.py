"""What a run does about a step that leaps: go back to a checkpoint, or end. `skip` is done when the step ends.

    rollback    load the newest checkpoint older than the window that the step was judged by; remove the newer ones;
                write the samples of the step into the list of those that are left out; go on from there

The order matters. Before the checkpoint is loaded nothing is removed, so that a damaged one costs nothing. Before the
list is written newer checkpoints are removed: a run that is killed between goes on from the newest that is left, whose
window is in it, meets the step again, and goes back again. So a kill changes no bit of what comes out.

The run's beginning counts as a checkpoint where the first was still to come.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tpengine import journal
from tpengine.architectures.model_path import run_of
from tpengine.checkpoint.rollbacks import FILE_NAME, Rollback, joined, read_rollbacks, rollback_of
from tpengine.config import ModelConfig
from tpengine.distributed.agreement import broadcast_json
from tpengine.runs.checkpoints import RunCheckpoints
from tpengine.runs.restoring import Beginning, restore_beginning, restore_older
from tpengine.runs.skipped_steps import read_for_all
from tpengine.runs.trainer import Trainer
from tpengine.training.planned_run import RunError
from tpengine.training.spikes import StepResult

# To one checkpoint; a fault that is not the data's comes again whatever is left out.
MOST_ROLLBACKS = 3


class SpikeAnswers:
    """Answers leaps in one run; all methods are collective, and so is the constructor.

    Args:
        trainer: runs the steps; it has restored a checkpoint, or begins.
        run_dir: the run's directory on rank 0; None elsewhere. A run that does not continue another keeps an earlier
            list aside.
        checkpoints: of the run.
        beginning: the weights that it began with, if it begins now.
        find_beginning: finds the weights of model.path again, for a run that has been resumed; ValueError if it cannot.

    Raises:
        RunError: on all ranks alike: the list cannot be read.
    """

    def __init__(
        self,
        trainer: Trainer,
        run_dir: Path | None,
        checkpoints: RunCheckpoints,
        beginning: Beginning | None,
        find_beginning: Callable[[ModelConfig], Beginning],
    ) -> None:
        self._trainer, self._checkpoints = trainer, checkpoints
        self._beginning, self._find_beginning = beginning, find_beginning
        self._path = None if run_dir is None else run_dir / FILE_NAME

        def read(path: Path) -> list[Any]:
            return [rollback.to_json() for rollback in read_rollbacks(path)]

        found = read_for_all(self._path, read, "rollbacks", resume=trainer.planned.config.resume)
        state = trainer.state
        state.rollbacks = joined([rollback_of(value) for value in found], state.rollbacks)

    @property
    def goes_back(self) -> bool:
        """Whether the answer is a rollback."""
        rule = self._trainer.state.spikes.rule
        return rule is not None and rule.action == "rollback"

    @property
    def skips(self) -> bool:
        """Whether there is no more to do than to skip the update."""
        rule = self._trainer.state.spikes.rule
        return rule is not None and rule.action == "skip"

    def words(self, step: int, result: StepResult) -> str:
        """Return what leaped, in words."""
        limits = self._trainer.step.limits
        return (
            f"step {step + 1} leaps: loss {result.loss:.6g} (at most {limits.loss:.6g}), gradient norm "
            f"{result.grad_norm:.6g} (at most {limits.grad_norm:.6g})"
        )

    def stop(self, step: int, result: StepResult) -> NoReturn:
        """End the run before a step's update.

        Raises:
            RunError: always, on all ranks alike. The state before the step is saved.
        """
        saved = self._checkpoints.save_before_leaving(step)
        raise RunError(
            f"{self.words(step, result)}, and --train.spike stop ends the run before its update: --resume with "
            f"--train.spike skip goes on without it, with rollback without its samples, with '' as if nothing were"
            f"{saved}"
        )

    def go_back(self, step: int, result: StepResult) -> Rollback:
        """Go back before the window of a step that has leaped, and leave its samples out.

        Returns:
            The rollback: the run goes on with the step `to`.

        Raises:
            RunError: on all ranks alike: MOST_ROLLBACKS have led to the same checkpoint, or none can be used.
        """
        trainer, checkpoints = self._trainer, self._checkpoints
        what, before = self.words(step, result), trainer.state.rollbacks
        until = trainer.state.spikes.first_step(step)
        checkpoints.wait()
        trainer.state.rank.activity.begin("going back to a checkpoint", timed=False)
        to = int(broadcast_json(self._target(until)))
        if sum(rollback.to == to for rollback in before) >= MOST_ROLLBACKS:
            raise RunError(
                f"{what}, and {MOST_ROLLBACKS} rollbacks have led to step {to} before: lower --optim.lr, look at the "
                f"text, or --resume with --train.spike skip{checkpoints.save_before_leaving(step)}"
            )
        phase = trainer.planned.phases.at(step)
        samples = trainer.position(step).range_of(phase.samples_per_step)
        to = self._load(step, to, until)
        rollback = Rollback(step, to, phase.order, samples, result.loss, result.grad_norm)
        trainer.state.rollbacks = tuple(joined(before, [rollback]))
        self._remove_newer(to)
        self._write()
        broadcast_json()
        trainer.enter_phase_of(to)
        return rollback

    def _target(self, until: int) -> int:
        """Return the steps of the checkpoint to go back to, 0 for the run's beginning; on rank 0."""
        return self._checkpoints.newest_until(until) or 0

    def _load(self, step: int, to: int, until: int) -> int:
        """Load a checkpoint of at most `until` steps, or the beginning if there cannot be one; return its steps."""
        trainer = self._trainer
        found = restore_older(trainer.state, trainer.planned, until)
        if found is not None:
            return found.index.step
        train = trainer.planned.config.train
        if until >= train.checkpoint_every:
            raise RunError(
                f"a rollback needs a checkpoint from before its window: none has at most {until} steps, though one of "
                f"step {train.checkpoint_every} could be there: put one back, or --resume with --train.spike skip"
                f"{self._checkpoints.save_before_leaving(step)}"
            )
        trainer.enter_phase_of(0)
        restore_beginning(trainer.state, self._found_beginning())
        return to

    def _found_beginning(self) -> Beginning | None:
        """Return the weights that the run began with; None for drawn ones."""
        model = self._trainer.planned.config.model
        if self._beginning is not None or not model.path:
            return self._beginning
        run = run_of(model.path)
        if run is not None and run[1] is None:
            raise RunError(
                f"a rollback to a run's beginning needs its weights: {model.path} may have others by now: give RUN@STEP"
            )
        try:
            return self._find_beginning(model)
        except ValueError as error:
            raise RunError(str(error)) from None

    def _remove_newer(self, to: int) -> None:
        problem = broadcast_json(self._checkpoints.go_back(to))
        if problem:
            raise RunError(problem)

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            rollbacks = self._trainer.state.rollbacks
            journal.write(self._path, [rollback.to_json() for rollback in rollbacks], durable=True)
        except OSError as error:
            print(
                f"tpengine: {self._path} cannot be written: {error}: a restart before the next checkpoint goes back "
                "again",
                file=sys.stderr,
                flush=True,
            )
