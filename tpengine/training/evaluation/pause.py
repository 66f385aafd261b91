"""What follows a step before the next one begins: evaluation and a sample that are due; leaving if a signal came."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch

from tpengine.distributed.process import max_over_ranks
from tpengine.observe.console import ProgressLine
from tpengine.observe.metrics import BackgroundWriter
from tpengine.observe.watch import Watch
from tpengine.training.evaluation.between_steps import Evaluation
from tpengine.training.planned_run import RunError
from tpengine.training.profiler.profiler import Profiler
from tpengine.training.state.checkpoints import RunCheckpoints


@dataclass(frozen=True)
class Pause:
    """Between two steps of one run; all methods but `go_back` are collective.

    Attributes:
        device: where this rank computes.
        watch, evaluation, checkpoints: of the run.
        writer: of its metrics, on rank 0; None elsewhere.
        progress, profiler: of the run.
    """

    device: torch.device
    watch: Watch
    evaluation: Evaluation
    checkpoints: RunCheckpoints
    writer: BackgroundWriter | None
    progress: ProgressLine
    profiler: Profiler

    def after(self, num_steps: int, samples: bool = True) -> float | None:
        """Evaluate and sample if that is due after `num_steps`; leave if a signal came meanwhile.

        Args: samples: whether to sample at all.
        Returns: the held-out loss; None if it is not due, or no target is valid.
        Raises: RunError: on all ranks alike: the held-out text cannot be read. The step is saved before.
        """
        evaluation, loss = self.evaluation, None
        try:
            if evaluation.is_due(num_steps):
                loss = self._evaluate(num_steps)
                self._stop_if_asked(num_steps, loss)
            if samples and evaluation.samples_at(num_steps):
                evaluation.sample(num_steps)
                self._stop_if_asked(num_steps, loss)
        except RunError as error:
            raise RunError(f"{error}{self.checkpoints.save_before_leaving(num_steps)}") from error
        return loss

    def stop(self, num_steps: int, stop_signal: int, held_out: float | None = None) -> NoReturn:
        """Save, and leave."""
        self.progress.__exit__()
        self.profiler.finish()
        self.leave(num_steps, stop_signal, held_out)

    def leave(self, num_steps: int, stop_signal: int, held_out: float | None) -> NoReturn:
        """Save, and leave, when nothing is shown or recorded any more."""

        def note(last_checkpoint: str) -> None:
            self.watch.activity.last_checkpoint = last_checkpoint

        message = self.checkpoints.save_and_say(num_steps, stop_signal, held_out, self.watch.seconds_left, note)
        if self.writer is not None:
            self.writer.exit_code = 128 + stop_signal
            self.watch.activity.begin("writing what it measured", timed=False)
            self.writer.close()
        self.watch.leave_stopped(stop_signal, message)

    def go_back(self, num_steps: int) -> None:
        """Forget what was reported of later steps: the run repeats them."""
        if self.writer is not None:
            self.writer.go_back(num_steps)
        self.progress.go_back(num_steps)
        self.profiler.go_back(num_steps)
        self.evaluation.go_back(num_steps)

    def _evaluate(self, num_steps: int) -> float | None:
        evaluation = self.evaluation
        before = evaluation.seconds
        losses = evaluation.held_out_losses()
        loss = losses.of_all
        if loss is not None:
            self.watch.activity.begin("writing what it measured", timed=False)
            if self.writer is not None:
                found = {"held_out_loss": loss, "evaluation_seconds": evaluation.seconds - before}
                found |= {f"held_out_loss/{name}": of_source for name, of_source in losses.of_source.items()}
                self.writer.complete(num_steps, found)
            self.progress.evaluated(loss)
        return loss

    def _stop_if_asked(self, num_steps: int, held_out: float | None) -> None:
        self.watch.activity.begin("asking whether to stop")
        (stop_signal,) = max_over_ranks([float(self.watch.stop)], self.device)
        if stop_signal:
            self.stop(num_steps, int(stop_signal), held_out)
