"""What follows a step before the next begins: the held-out loss and a sample that are due; leaving if a signal came.

Evaluation and sampling run the weights that are there through a forward-only plan, over the groups that training uses.
They draw nothing from a generator and leave dropout's counters alone, so that training's bits are those of a run
without them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console

from tpengine import journal
from tpengine.distributed.process import max_over_ranks
from tpengine.observe.console import ProgressLine, show_sample, texts_of
from tpengine.observe.metrics import BackgroundWriter
from tpengine.observe.watch import Watch
from tpengine.runs.callbacks import Callbacks
from tpengine.runs.checkpoints import RunCheckpoints
from tpengine.runs.evaluation import ForwardPass, HeldOutLoss, evaluation_pass, held_out_losses, read_prompt, sample
from tpengine.runs.profiler import Profiler
from tpengine.training.objective import Objective
from tpengine.training.planned_run import PlannedPhase, RunError
from tpengine.training.train_state import TrainState

_PROMPT_TOKENS = 16


class Evaluation:
    """Evaluates one run; all methods but those that ask what is due are collective.

    Args:
        state: has the model.
        run_dir: where samples.jsonl goes, on rank 0; None elsewhere.
        console: where samples are shown.
        decode: returns what makes text of tokens, or None where they are shown as they are; asked once.
        first_step: of a run that continues: samples of later steps are removed, because it draws them again.
        objective: what the run minimises, and its metrics; as held_out_losses.

    Attributes:
        seconds: how long all evaluations and samples have taken.
    """

    def __init__(
        self,
        state: TrainState,
        run_dir: Path | None,
        console: Console,
        decode: Callable[[], Callable[[list[int]], str] | None],
        first_step: int = 0,
        objective: Objective | None = None,
    ) -> None:
        self._objective = objective
        self._state, self._console, self._find_decode = state, console, decode
        self._path = None if run_dir is None else run_dir / "samples.jsonl"
        self._decode: Callable[[list[int]], str] | None = None
        self._forward: tuple[PlannedPhase, ForwardPass] | None = None
        self.seconds = 0.0
        self.go_back(first_step)

    def go_back(self, num_steps: int) -> None:
        """Remove the samples of later steps, and what is no sample: the run draws them again."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                lines = journal.read(self._path)
                journal.write(self._path, [line for line in lines if line.index is not None and line.index < num_steps])

    def is_due(self, num_steps: int) -> bool:
        """Return whether the held-out loss follows this many steps: every train.eval_every, and the last."""
        train = self._state.part.config.train
        is_last = num_steps == train.steps
        return train.eval_micro_batches > 0 and (is_last or _is_multiple(num_steps, train.eval_every))

    def samples_at(self, num_steps: int) -> bool:
        """Return whether a sample follows this many steps; that of the last step is drawn at the run's end."""
        train = self._state.part.config.train
        return train.sample_tokens > 0 and num_steps < train.steps and _is_multiple(num_steps, train.sample_every)

    def held_out_losses(self) -> HeldOutLoss:
        """Return the held-out losses of the weights as they are.

        Raises:
            RunError: as held_out.held_out_losses.
        """
        begin = time.perf_counter()
        part = self._state.part
        if self._forward is None or self._forward[0] is not part:
            # Its plan is verified once in a phase.
            self._forward = part, evaluation_pass(self._state)
        loss = held_out_losses(self._state, self._forward[1], self._objective)
        self.seconds += time.perf_counter() - begin
        return loss

    def sample(self, num_steps: int) -> None:
        """Draw a sample, show it, and append it to samples.jsonl.

        Raises:
            RunError: on all ranks alike: the text of the prompt cannot be read.
        """
        state, begin = self._state, time.perf_counter()
        prompt = read_prompt(state, _PROMPT_TOKENS)
        tokens = sample(state, prompt, state.part.config.train.sample_tokens)
        if self._path is not None:
            self._decode = self._decode or self._find_decode()
            texts = texts_of(tokens, len(prompt), state.part.config.model.vocab_size, self._decode)
            show_sample(self._console, *texts)
            self._keep(num_steps, tokens, texts)
        self.seconds += time.perf_counter() - begin

    def _keep(self, num_steps: int, tokens: list[int], texts: tuple[str, str]) -> None:
        assert self._path is not None
        row = {**journal.numbered(num_steps - 1), "prompt": texts[0], "text": texts[1], "tokens": tokens}
        self._state.rank.activity.begin("writing a sample", timed=False)
        try:
            journal.append(self._path, row)
        except OSError as error:
            self._console.print(
                f"the sample is not in {self._path.name}: {error}", markup=False, highlight=False, soft_wrap=True
            )


def _is_multiple(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


@dataclass(frozen=True)
class Pause:
    """Between two steps of one run; all methods but `go_back` are collective.

    Attributes:
        device: where this rank computes.
        watch, evaluation, checkpoints: of the run.
        writer: of its metrics, on rank 0; None elsewhere.
        progress, profiler, callbacks: of the run.
    """

    device: torch.device
    watch: Watch
    evaluation: Evaluation
    checkpoints: RunCheckpoints
    writer: BackgroundWriter | None
    progress: ProgressLine
    profiler: Profiler
    callbacks: Callbacks

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
            found = {"held_out_loss": loss, "evaluation_seconds": evaluation.seconds - before}
            found |= {f"held_out_loss/{name}": of_source for name, of_source in losses.of_source.items()}
            found |= {f"held_out_metric/{name}": value for name, value in losses.metrics.items()}
            if self.writer is not None:
                self.writer.complete(num_steps, found)
            self.progress.evaluated(loss)
            self.callbacks.after_evaluation({"step": num_steps, **found})
        return loss

    def _stop_if_asked(self, num_steps: int, held_out: float | None) -> None:
        self.watch.activity.begin("asking whether to stop")
        (stop_signal,) = max_over_ranks([float(self.watch.stop)], self.device)
        if stop_signal:
            self.stop(num_steps, int(stop_signal), held_out)
