"""One training run from start to finish: set up, show the plan, train, evaluate, save, sample. Called by train.py."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from tpengine.checkpoint.resume import Checkpoint
from tpengine.checkpoint.upload import Uploads
from tpengine.distributed.agreement import broadcast_json
from tpengine.distributed.mesh import Shape, problem_of_ranks
from tpengine.distributed.process import max_over_ranks, start, stop
from tpengine.last_words import forget_last_words
from tpengine.layout.parameters import kv_replicas
from tpengine.observe.activity import OtherRanks
from tpengine.observe.console import ProgressLine, console_for, show_held_out, show_next
from tpengine.observe.metrics import BackgroundWriter, left_out_record, peak_memory_bytes, step_record
from tpengine.observe.watch import Watch
from tpengine.runs.between_steps import Evaluation, Pause
from tpengine.runs.callbacks import Callbacks
from tpengine.runs.checkpoints import RunCheckpoints
from tpengine.runs.job import Job, RunResult
from tpengine.runs.load_limit import LoadLimit
from tpengine.runs.opening import open_writer
from tpengine.runs.own_parts import check_same_on_all_ranks, name_of_loss
from tpengine.runs.profiler import Profiler
from tpengine.runs.restoring import restore_newest
from tpengine.runs.skipped_steps import SkippedSteps
from tpengine.runs.spike_answers import SpikeAnswers
from tpengine.runs.trainer import Trainer
from tpengine.runs.waiting import AwaitedRanks, Peers
from tpengine.training.expert_loads import ROWS_OVER
from tpengine.training.planned_run import RunError
from tpengine.training.spikes import StepResult
from tpengine.training.train_state import TrainState


def train(job: Job, watch: Watch) -> RunResult:
    """Train, evaluate and sample; collective over all ranks. No process group may exist yet.

    Args:
        job: what to train.
        watch: handles signals and hangs while this runs.

    Returns:
        What has come of it.

    Raises:
        RunError: on all ranks alike, for what the user can fix.
    """
    watch.activity.begin("connecting with the other ranks")
    config = job.config
    kv = kv_replicas(config.model, config.parallel.tp or 1)
    check = partial(problem_of_ranks, shape=Shape.of(config.parallel), kv_replicas=kv)
    try:
        start(job.device, job.launch, job.meeting, config.train.timeout_seconds, check)
    except ValueError as error:
        raise RunError(str(error)) from error
    try:
        with _pulse(job, watch):
            # Keep no variable of the run here: it would keep the process groups alive until they are destroyed below.
            result, uploads = _loop(_set_up(job, watch))
    except RunError as error:
        # All ranks come here. Clear the traceback's frames first: they keep the process groups alive.
        traceback.clear_frames(error.__traceback__)
        _end_groups(watch)
        raise
    _end_groups(watch)
    if uploads is not None:
        # The other ranks have ended or end now: nobody waits for the last upload but rank 0.
        watch.activity.begin("waiting for --train.after-checkpoint", timed=False)
        uploads.finish()
    return result


def _pulse(job: Job, watch: Watch) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the watch knows whether any rank still makes progress."""
    if job.launch.world_size == 1:
        return contextlib.nullcontext()
    return watch.pulsing(job.meeting.another_client(), computes_on_cores=job.device.type == "cpu")


def _end_groups(watch: Watch) -> None:
    # Forget the other ranks first: what is known of them keeps the trainer, and with it the process groups, alive.
    watch.activity.ranks = OtherRanks()
    stop()


@dataclass(frozen=True)
class _Run:
    """The parts of a run that has been set up.

    Attributes:
        run_dir: its directory, as rank 0's host has it.
        checkpoint: where it continues; None at step 0.
    """

    job: Job
    watch: Watch
    run_dir: Path
    console: Console
    callbacks: Callbacks
    loads: LoadLimit
    trainer: Trainer
    checkpoint: Checkpoint | None
    checkpoints: RunCheckpoints
    skipped: SkippedSteps
    spikes: SpikeAnswers
    evaluation: Evaluation

    @property
    def first_step(self) -> int:
        """The first step to run, 0-based."""
        return 0 if self.checkpoint is None else self.checkpoint.index.step

    @property
    def known_held_out(self) -> float | None:
        """The held-out loss of the step before, if the checkpoint knows it."""
        loss = None if self.checkpoint is None else self.checkpoint.index.state.get("held_out_loss")
        return float(loss) if isinstance(loss, int | float) else None


def _set_up(job: Job, watch: Watch) -> _Run:
    """Build the model and its groups, and restore the checkpoint if there is one; collective."""
    watch.activity.begin("building the model and its groups")
    check_same_on_all_ranks(job.objective, job.optimizer, job.callbacks, job.device)
    draws = job.checkpoint is None and job.beginning is None
    trainer = Trainer(
        job.config,
        job.corpora[0],
        job.device,
        activity=watch.activity,
        decided=job.decided,
        draws=draws,
        corpora=job.corpora,
        optimizer=job.optimizer,
        objective=job.objective,
    )
    state, planned = trainer.state, trainer.planned
    run_dir = Path(broadcast_json(str(job.run_dir and job.run_dir.absolute())))
    watch.activity.ranks = _ranks_of(job, state, run_dir)
    watch.activity.begin("reading the checkpoint", timed=False)
    checkpoint = restore_newest(state, planned, job.checkpoint)
    if checkpoint is None and job.beginning is not None:
        watch.activity.begin("reading the weights to begin with", timed=False)
        job.beginning.fill(state)
    elif checkpoint is None and not draws:
        # The checkpoint that was there has been removed meanwhile.
        state.draw_weights()
    trainer.enter_phase_of(0 if checkpoint is None else checkpoint.index.step)
    callbacks = Callbacks(job.callbacks, job.launch.rank, watch.activity, job.device)
    checkpoints = RunCheckpoints(state, planned, job.run_dir, callbacks, name_of_loss(job.objective))
    skipped = SkippedSteps(planned, watch.activity, job.run_dir)
    beginning = job.beginning if checkpoint is None else None
    spikes = SpikeAnswers(trainer, job.run_dir, checkpoints, beginning, job.wings.find_beginning)
    console, first_step = console_for(job.launch.rank), 0 if checkpoint is None else checkpoint.index.step
    decoder = partial(_decoder, job, console)
    evaluation = Evaluation(state, job.run_dir, console, decoder, first_step, trainer.objective)
    given, restored = (callbacks, LoadLimit(job.wings, job.device.type)), (checkpoint, checkpoints)
    return _Run(job, watch, run_dir, console, *given, trainer, *restored, skipped, spikes, evaluation)


def _ranks_of(job: Job, state: TrainState, run_dir: Path) -> AwaitedRanks:
    """Return what tells whom this rank waits for, also in the run's directory if this host sees it; collective."""
    peers = Peers(job.device)
    if job.run_dir is not None:
        forget_last_words(job.run_dir)
    return AwaitedRanks(state, peers, run_dir if run_dir.is_dir() else None, job.hosts)


def _loop(run: _Run) -> tuple[RunResult, Uploads | None]:
    """Train the steps that are left, evaluate, and write their metrics; at the end show a sample; collective.

    Returns: what has come of it, and what still runs --train.after-checkpoint.
    """
    job, watch, trainer, checkpoints = run.job, run.watch, run.trainer, run.checkpoints
    loss: float | None = None
    num_second = 0
    state = trainer.state
    skipped, spikes = run.skipped, run.spikes
    with (
        open_writer(trainer.planned, state, job, run.console, run.checkpoint) as writer,
        checkpoints,
        job.content as content,
        contextlib.closing(trainer),
    ):
        say = partial(run.console.print, markup=False, highlight=False)
        profiler = Profiler(trainer.planned, job.device, job.run_dir, job.wings.write_recording, run.first_step, say)
        watch.activity.timeout_seconds = job.config.train.timeout_seconds
        watch.activity.stoppable = True
        with ProgressLine(run.console, job.config.train.steps, run.first_step) as progress:
            pause = Pause(job.device, watch, run.evaluation, checkpoints, writer, progress, profiler, run.callbacks)
            # A run that was stopped before it evaluated its last step does so now.
            held_out = run.known_held_out
            if run.first_step and held_out is None:
                trainer.enter_phase_of(run.first_step - 1)
                held_out = pause.after(run.first_step, samples=False)
                trainer.enter_phase_of(run.first_step)
            wall = time.perf_counter()
            step = run.first_step
            while step < job.config.train.steps:
                # First of all: what follows a step, also one that is left out, belongs to the step's phase.
                if trainer.enter_phase_of(step):
                    say(f"phase {state.part.phase.number + 1} begins at step {step + 1}")
                # A step that was skipped before a restart is not computed again.
                if skipped.leaves_out(step):
                    _write(writer, progress, left_out_record(step, skipped.num_until(step)))
                    held_out = pause.after(step + 1)
                    checkpoints.after_step(step + 1, held_out)
                    step += 1
                    continue
                # Train.
                profiler.begin(step, trainer.step)
                begin = time.perf_counter()
                result = trainer.step.run(step, partial(_figures, begin, run))
                seconds, _, stop_signal, content_flag, is_writing, *waits = result.largest
                # Write its metrics. The ranks told their times before their GPUs were done; this rank's is done now.
                now = time.perf_counter()
                seconds, wall_seconds, wall = max(seconds, now - begin), now - wall, now
                record = _record(run, step, result, seconds, wall_seconds, waits)
                watch.activity.begin("writing what it measured", timed=False)
                if writer is not None or run.callbacks.are_given:
                    record |= state.part.corpus.train.progress(trainer.position_after(step))
                is_applied_or_skipped = not result.spiked or spikes.skips
                if is_applied_or_skipped:
                    _write(writer, progress, record)
                if result.is_second:
                    num_second += 1
                    # Said less and less often: a load may swing around what there is room for.
                    if num_second.bit_count() == 1:
                        say(_why_second(step, result, state, num_second))
                profiler.end(step, seconds)
                # React: to a text that has changed, a step that leaps or was skipped, a signal to stop, what is due.
                if content_flag:
                    raise RunError(content.explain(int(content_flag)))
                if not is_applied_or_skipped:
                    if stop_signal:  # the run meets the step again when it goes on
                        pause.stop(step, int(stop_signal))
                    step = _answer_spike(run, pause, step, result)
                    continue
                loss = result.loss
                skipped.note(step, result, trainer.step)
                run.callbacks.after_step(record)
                if stop_signal:
                    pause.stop(step + 1, int(stop_signal))
                held_out = pause.after(step + 1)
                checkpoints.after_step(step + 1, held_out, bool(is_writing))
                if failure := run.callbacks.failure() or run.loads.failure(step, trainer.step):
                    raise RunError(f"{failure}{checkpoints.save_before_leaving(step + 1)}")
                step += 1
        profiler.finish()
        _end_steps(run, pause, held_out)
        # Before the writer ends: it tells others how the run has ended.
        _show_result(run, held_out)
        newest = checkpoints.newest()
        checkpoint = None if newest is None else run.run_dir / newest.relative_to(newest.parents[1])
        ended = RunResult(run.run_dir, job.config.train.steps, loss, held_out, checkpoint)
    return ended, checkpoints.uploads


def _record(
    run: _Run, step: int, result: StepResult, seconds: float, wall_seconds: float, waits: Sequence[float]
) -> dict[str, Any]:
    """Return a step's row of metrics."""
    return step_record(
        run.trainer.state.part.config,
        run.job.device,
        step=step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=result.lr,
        step_seconds=seconds,
        peak_memory_bytes=int(result.largest[1]),
        skipped=result.skipped,
        skipped_steps=run.skipped.num_until(step) + result.is_not_finite,
        spiked=result.spiked,
        overflowed=result.overflowed,
        loss_scale=result.loss_scale,
        wall_seconds=wall_seconds,
        stage_waits=waits,
        metrics=result.metrics,
        loads=result.loads,
        is_second=result.is_second,
    )


def _why_second(step: int, result: StepResult, state: TrainState, num_second: int) -> str:
    """Return why a step was computed twice, in words."""
    load = state.rank.comms.row_load
    return (
        f"step {step + 1} was computed twice: {result.loads[ROWS_OVER]:,} rows of experts were more than {load:g} "
        "times the mean, for which there is room; then, and until rows fit, they travel at their exact number "
        f"({num_second} such steps since this start; a larger --parallel.moe-load has more room)"
    )


def _answer_spike(run: _Run, pause: Pause, step: int, result: StepResult) -> int:
    """Go back, or end, because a step leaps; return the step to go on with; collective.

    Raises: RunError: on all ranks alike: the run ends.
    """
    what = run.spikes.words(step, result)
    numbers = {"spike_loss": result.loss, "spike_grad_norm": result.grad_norm}
    if not run.spikes.goes_back:
        if pause.writer is not None:
            pause.writer.write({"step": step + 1, "event": "stop", **numbers})
        run.spikes.stop(step, result)
    rollback = run.spikes.go_back(step, result)
    run.skipped.go_back(rollback.to)
    pause.go_back(rollback.to)
    if pause.writer is not None:
        pause.writer.write({"step": step + 1, "event": "rollback", "to": rollback.to, **numbers})
    number = sum(end - first for first, end in rollback.samples)
    where = f"step {rollback.to + 1}, without the {number} samples of step {step + 1}"
    run.console.print(f"{what}: the run goes back to {where}", markup=False, highlight=False, soft_wrap=True)
    return rollback.to


def _write(writer: BackgroundWriter | None, progress: ProgressLine, record: dict[str, Any]) -> None:
    """Write a step's record, and show it."""
    if writer is not None:
        writer.write(record)
    progress.update(record)


def _end_steps(run: _Run, pause: Pause, held_out: float | None) -> None:
    """Wait for the last checkpoint, then handle a signal or a changed text that came during the last step."""
    watch, checkpoints = run.watch, run.checkpoints
    checkpoints.wait()
    if failure := run.callbacks.failure():
        raise RunError(f"{failure}{checkpoints.where()}")
    stop_signal, content_flag = max_over_ranks([float(watch.stop), float(run.job.content.flag)], run.job.device)
    if content_flag:
        raise RunError(run.job.content.explain(int(content_flag)))
    if stop_signal:
        pause.leave(run.job.config.train.steps, int(stop_signal), held_out)
    watch.activity.last_checkpoint = checkpoints.where()
    watch.activity.stoppable = False


def _show_result(run: _Run, held_out: float | None) -> None:
    """Show the held-out loss of the last step, a sample, and what is next; collective."""
    train = run.job.config.train
    if train.eval_micro_batches:
        show_held_out(run.console, held_out)
    if train.sample_tokens:
        run.evaluation.sample(train.steps)
    run.checkpoints.raise_if_the_last_is_missing()
    if run.job.run_dir is not None:
        show_next(run.console, run.job.run_dir, run.checkpoints.newest())


def _decoder(job: Job, console: Console) -> Callable[[list[int]], str] | None:
    """Return what makes text of tokens: the tokenizer of the weights that the run began from, on rank 0.

    A run that has come this far does not fail for it: without one tokens are shown as they are.
    """
    if job.run_dir is None:
        return None
    try:
        return job.wings.decoder_of(job.run_dir)
    except ValueError as error:
        console.print(f"the sample is shown as ids: {error}", markup=False, highlight=False, soft_wrap=True)
        return None


def _figures(begin: float, run: _Run) -> list[float]:
    """Return what a rank tells the others at the end of a step.

    Its seconds, peak memory, signal, content flag, and whether it still writes a checkpoint. Where the host knows how
    long it waited for other stages (on a CPU), also that, at the place of its stage.
    """
    memory, mesh = peak_memory_bytes(run.job.device), run.trainer.state.rank.mesh
    flags = float(run.watch.stop), float(run.job.content.flag), float(run.checkpoints.is_writing)
    figures = [time.perf_counter() - begin, float(memory), *flags]
    if run.job.device.type != "cpu" or mesh.shape.pp == 1:
        return figures
    waits = [run.trainer.step.waited_seconds * (stage == mesh.at.pp) for stage in range(mesh.shape.pp)]
    return figures + waits
