"""One training run from start to finish: set up, show the plan, train, evaluate, save, sample. Called by train.py."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tpengine.checkpoint.resume import Checkpoint, changes_since
from tpengine.checkpoint.run_directory import write_config
from tpengine.checkpoint.upload import Uploads
from tpengine.config import Config, decay_steps_of
from tpengine.config.amounts import amount_of
from tpengine.data import CPU_SHARE, GPU_SHARE, ContentChecks, Corpus
from tpengine.distributed.launch import Launch
from tpengine.distributed.meeting import Meeting
from tpengine.distributed.messages import broadcast_json
from tpengine.distributed.process import max_over_ranks, start, stop
from tpengine.files import write_beside
from tpengine.hugging_face.directory import ModelDirectory
from tpengine.hugging_face.kept import hand_on, keep_source, kept_tokenizer
from tpengine.last_words import RANK_FAILED, USER_ERROR, forget_last_words
from tpengine.observe.activity import Doing
from tpengine.observe.background import BackgroundWriter
from tpengine.observe.console import ProgressLine, console_for, show_held_out, show_phases, show_plan
from tpengine.observe.metrics import MetricsWriter, left_out_record, peak_memory_bytes, step_record
from tpengine.observe.pulse import Pulse
from tpengine.observe.wandb_run import WandbRun
from tpengine.observe.watch import Watch
from tpengine.plan import Residency
from tpengine.simulate.machine import machine_on
from tpengine.simulate.modelled.memory import memory_of
from tpengine.training.evaluation.between_steps import Evaluation
from tpengine.training.evaluation.pause import Pause
from tpengine.training.phase_parts import PhasePart, enter_phase_of
from tpengine.training.profiler.peers import Peers
from tpengine.training.profiler.profiler import Profiler
from tpengine.training.profiler.waiting import awaited, explain, keep_last_words
from tpengine.training.state.beginning import Beginning, begin_from
from tpengine.training.state.checkpoints import RunCheckpoints
from tpengine.training.state.restoring import restore_newest
from tpengine.training.state.skipped_steps import SkippedSteps
from tpengine.training.state.spike_answers import SpikeAnswers
from tpengine.training.trainer import RunError, Trainer
from tpengine.training.update.picture import draw_learning_rate
from tpengine.training.update.step_result import StepResult


@dataclass(frozen=True)
class Job:
    """The work of one rank.

    Attributes:
        config: validated configuration.
        corpora: the text of each phase.
        launch, device: this rank, and the device where it computes.
        shared_cores: number of cores that the ranks of this host share as threads; 0 if the user set the threads.
        meeting: where the ranks have met.
        run_dir: existing directory for config.toml, the file of a schedule of the user's own, metrics.jsonl and
            TensorBoard events, on rank 0; None elsewhere.
        checkpoint: where to continue, unless a rank cannot use it; None starts at step 0.
        beginning: the weights that step 0 starts from; None for drawn ones.
    """

    config: Config
    corpora: tuple[Corpus, ...]
    launch: Launch
    device: torch.device
    shared_cores: int
    residency: Residency
    meeting: Meeting
    run_dir: Path | None
    checkpoint: Checkpoint | None
    beginning: Beginning | None = None


def train(job: Job, watch: Watch) -> None:
    """Train, evaluate and sample; collective over all ranks. No process group may exist yet.

    Args:
        job: what to train.
        watch: handles signals and hangs while this runs.

    Raises:
        RunError: on all ranks alike, for what the user can fix.
    """
    watch.activity.begin("connecting with the other ranks")
    start(job.device, job.launch, job.meeting.store)
    try:
        with _pulse(job, watch):
            # Keep no variable of the run here: it would keep the process groups alive until they are destroyed below.
            uploads = _loop(_set_up(job, watch))
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


@contextlib.contextmanager
def _pulse(job: Job, watch: Watch) -> Iterator[None]:
    """Tell the watch, inside the context, whether any rank still makes progress."""
    if job.launch.world_size == 1:
        yield
        return
    watch.computes_on_cores = job.device.type == "cpu"
    with Pulse(job.meeting.another_client(), lambda: bool(watch.stop), watch.moves) as watch.pulse:
        yield
    watch.pulse = None


def _end_groups(watch: Watch) -> None:
    # Drop the watch's methods first: they keep the trainer, and with it the process groups, alive.
    watch.explain, watch.waits, watch.keep = lambda _: "", lambda _: True, lambda *_: None
    stop()


@dataclass(frozen=True)
class _Run:
    """The parts of a run that has been set up.

    Attributes:
        checkpoint: where it continues; None at step 0.
        content: checks that the texts are still what they were when the run began.
    """

    job: Job
    watch: Watch
    console: Console
    trainer: Trainer
    checkpoint: Checkpoint | None
    checkpoints: RunCheckpoints
    skipped: SkippedSteps
    spikes: SpikeAnswers
    content: ContentChecks
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
    draws = job.checkpoint is None and job.beginning is None
    trainer = Trainer(
        job.config,
        job.corpora[0],
        job.device,
        activity=watch.activity,
        residency=job.residency,
        draws=draws,
        corpora=job.corpora,
    )
    peers = Peers(job.device)
    watch.explain = partial(explain, trainer, peers)
    watch.keep = _keeper(job, trainer, peers)
    watch.waits = lambda what: bool(awaited(trainer, what))
    watch.activity.begin("reading the checkpoint", timed=False)
    checkpoint = restore_newest(trainer, job.checkpoint)
    if checkpoint is None and job.beginning is not None:
        watch.activity.begin("reading the weights to begin with", timed=False)
        begin_from(trainer, job.beginning)
    elif checkpoint is None and not draws:
        # The checkpoint that was there has been removed meanwhile.
        trainer.draw_weights()
    enter_phase_of(trainer, 0 if checkpoint is None else checkpoint.index.step)
    checkpoints, skipped = RunCheckpoints(trainer, job.run_dir), SkippedSteps(trainer, job.run_dir)
    spikes = SpikeAnswers(trainer, job.run_dir, checkpoints, job.beginning if checkpoint is None else None)
    share = GPU_SHARE if job.device.type == "cuda" else CPU_SHARE
    texts = [text for corpus in job.corpora for text in corpus.texts]
    content = ContentChecks(texts, job.launch.rank, reads=job.launch.local_rank == 0, share=share)
    console, first_step = console_for(job.launch.rank), 0 if checkpoint is None else checkpoint.index.step
    evaluation = Evaluation(trainer, job.run_dir, console, partial(_decoder, job, console), first_step)
    return _Run(job, watch, console, trainer, checkpoint, checkpoints, skipped, spikes, content, evaluation)


def _keeper(job: Job, trainer: Trainer, peers: Peers) -> Callable[[str, Doing, bool], None]:
    """Return what keeps this rank's last words in the run's directory, if this host sees it; collective."""
    if job.run_dir is not None:
        forget_last_words(job.run_dir)
    run_dir = Path(broadcast_json(str(job.run_dir and job.run_dir.absolute())))
    return partial(keep_last_words, trainer, peers, run_dir) if run_dir.is_dir() else lambda *_: None


def _loop(run: _Run) -> Uploads | None:
    """Train the steps that are left, evaluate, and write their metrics; at the end show a sample; collective.

    Returns: what still runs --train.after-checkpoint.
    """
    job, watch, trainer, checkpoints = run.job, run.watch, run.trainer, run.checkpoints
    skipped, spikes = run.skipped, run.spikes
    with (
        open_writer(trainer, job, run.console, run.checkpoint) as writer,
        checkpoints,
        run.content as content,
        contextlib.closing(trainer),
    ):
        say = partial(run.console.print, markup=False, highlight=False)
        profiler = Profiler(trainer, job.run_dir, run.first_step, say)
        watch.timeout_seconds = job.config.train.timeout_seconds
        watch.stoppable = True
        with ProgressLine(run.console, job.config.train.steps, run.first_step) as progress:
            pause = Pause(trainer, watch, run.evaluation, checkpoints, writer, progress, profiler)
            # A run that was stopped before it evaluated its last step does so now.
            held_out = run.known_held_out
            if run.first_step and held_out is None:
                enter_phase_of(trainer, run.first_step - 1)
                held_out = pause.after(run.first_step, samples=False)
                enter_phase_of(trainer, run.first_step)
            wall = time.perf_counter()
            step = run.first_step
            while step < job.config.train.steps:
                # A step that was skipped before a restart is not computed again.
                if skipped.leaves_out(step):
                    _write(writer, progress, left_out_record(step, skipped.num_until(step)))
                    held_out = pause.after(step + 1)
                    checkpoints.after_step(step + 1, held_out)
                    step += 1
                    continue
                if enter_phase_of(trainer, step):
                    say(f"phase {trainer.phase.number + 1} begins at step {step + 1}")
                # Train.
                profiler.begin(step)
                begin = time.perf_counter()
                result = trainer.train_step(step, partial(_figures, begin, run))
                seconds, memory, stop_signal, content_flag, is_writing, *waits = result.largest
                # Write its metrics. The ranks told their times before their GPUs were done; this rank's is done now.
                now = time.perf_counter()
                seconds, wall_seconds, wall = max(seconds, now - begin), now - wall, now
                record = step_record(
                    trainer.config,
                    job.device,
                    step=step,
                    loss=result.loss,
                    grad_norm=result.grad_norm,
                    lr=result.lr,
                    step_seconds=seconds,
                    peak_memory_bytes=int(memory),
                    skipped=result.skipped,
                    skipped_steps=skipped.num_until(step) + result.is_not_finite,
                    spiked=result.spiked,
                    overflowed=result.overflowed,
                    loss_scale=result.loss_scale,
                    wall_seconds=wall_seconds,
                    stage_waits=waits,
                )
                trainer.activity.begin("writing what it measured", timed=False)
                if writer is not None:
                    record |= trainer.corpus.train.progress(trainer.position_after(step))
                is_applied_or_skipped = not result.spiked or spikes.skips
                if is_applied_or_skipped:
                    _write(writer, progress, record)
                profiler.end(step, seconds)
                # React: to a text that has changed, a step that leaps or was skipped, a signal to stop, what is due.
                if content_flag:
                    raise RunError(content.explain(int(content_flag)))
                if not is_applied_or_skipped:
                    if stop_signal:  # the run meets the step again when it goes on
                        pause.stop(step, int(stop_signal))
                    step = _answer_spike(run, pause, step, result)
                    continue
                skipped.note(step, result)
                if stop_signal:
                    pause.stop(step + 1, int(stop_signal))
                held_out = pause.after(step + 1)
                checkpoints.after_step(step + 1, held_out, bool(is_writing))
                step += 1
        profiler.finish()
        _end_steps(run, pause, held_out)
    _show_result(run, held_out)
    return checkpoints.uploads


def _answer_spike(run: _Run, pause: Pause, step: int, result: StepResult) -> int:
    """Go back, or end, because a step leaps; return the step to go on with; collective.

    Raises: RunError: on all ranks alike: the run ends.
    """
    what = run.spikes.words(step, result)
    numbers = {"spike_loss": result.loss, "spike_grad_norm": result.grad_norm}
    if not run.spikes.goes_back:
        if pause.writer is not None:
            pause.writer.write({"step": step, "event": "stop", **numbers})
        run.spikes.stop(step, result)
    rollback = run.spikes.go_back(step, result)
    run.skipped.go_back(rollback.to)
    pause.go_back(rollback.to)
    if pause.writer is not None:
        pause.writer.write({"step": step, "event": "rollback", "to": rollback.to, **numbers})
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
    stop_signal, content_flag = max_over_ranks([float(watch.stop), float(run.content.flag)], run.job.device)
    if content_flag:
        raise RunError(run.content.explain(int(content_flag)))
    if stop_signal:
        pause.leave(run.job.config.train.steps, int(stop_signal), held_out)
    watch.parting = checkpoints.where()
    watch.stoppable = False


def _show_result(run: _Run, held_out: float | None) -> None:
    """Show the held-out loss of the last step, and a sample; collective."""
    train = run.job.config.train
    if train.eval_micro_batches:
        show_held_out(run.console, held_out)
    if train.sample_tokens:
        run.evaluation.sample(train.steps)
    run.checkpoints.raise_if_the_last_is_missing()


def _decoder(job: Job, console: Console) -> Callable[[list[int]], str] | None:
    """Return what makes text of tokens: the tokenizer of the weights that the run began from, on rank 0.

    A run that has come this far does not fail for it: without one tokens are shown as they are.
    """
    if job.run_dir is None:
        return None
    try:
        tokenizer = kept_tokenizer(job.run_dir)
    except ValueError as error:
        console.print(f"the sample is shown as ids: {error}", markup=False, highlight=False, soft_wrap=True)
        return None
    return None if tokenizer is None else tokenizer.decode


@contextlib.contextmanager
def open_writer(
    trainer: Trainer, job: Job, console: Console, checkpoint: Checkpoint | None
) -> Iterator[BackgroundWriter | None]:
    """Show the plan, write the resolved configuration, and yield the writer of metrics, closed at the end; collective.

    Raises:
        RunError: on all ranks alike: rank 0 cannot write into the run directory.
    """
    writer, problem = None, ""
    if job.run_dir is not None:
        _say_what_will_happen(trainer, job, job.run_dir, console, checkpoint)
        first_step = checkpoint.index.step if checkpoint is not None else 0
        try:
            _write_config(trainer, job.run_dir)
            _keep_beginning(job)
            picture = draw_learning_rate(
                trainer.rate, trainer.config.train.steps, [phase.first_step for phase in trainer.phases][1:]
            )
            write_beside(job.run_dir / "learning_rate.svg", picture.encode())
            wandb = None
            if trainer.config.train.wandb:
                settings, continues = asdict(trainer.run_config), bool(first_step)
                wandb = WandbRun(trainer.config.train.wandb, job.run_dir, settings, continues=continues)
            writer = MetricsWriter(job.run_dir, first_step or None, wandb)
        except OSError as error:
            problem = f"the run directory must take the run's files: {error}: fix that or use another --run-dir"
        except ValueError as error:
            problem = str(error)
    problem = broadcast_json(problem)
    if problem:
        raise RunError(problem)
    behind = None
    try:
        if writer is not None:
            _say_what_is_written(writer, console)
        behind = None if writer is None else BackgroundWriter(writer)
        yield behind
    except BaseException as error:
        if behind is not None:
            behind.exit_code = USER_ERROR if isinstance(error, RunError) else RANK_FAILED
        raise
    finally:
        if behind is not None:
            behind.close()


def _say_what_will_happen(
    trainer: Trainer, job: Job, run_dir: Path, console: Console, checkpoint: Checkpoint | None
) -> None:
    config, device = trainer.config, trainer.device
    exchange = trainer.comms.describe(trainer.mailbox)
    show_plan(console, config, trainer.layout, trainer.plan, device, exchange, run_dir, job.shared_cores)
    show_phases(console, trainer.phases, [_peak(part, device) for part in trainer.parts])
    if config.resume:
        # What a checkpoint has are the settings of its last step's phase.
        done = 0 if checkpoint is None else checkpoint.index.step
        phase_config = trainer.phases.at(max(done - 1, 0)).config
        used = replace(phase_config, device="cuda" if device.type == "cuda" else "cpu")
        _say_what_is_resumed(console, used, checkpoint)
    _say_where_learning_ends(console, trainer)


def _peak(part: PhasePart, device: torch.device) -> int:
    return max(rank.peak for rank in memory_of(part.config, part.layout, part.plan, machine_on(device.type)))


def _say_what_is_written(writer: MetricsWriter, console: Console) -> None:
    if writer.kept is not None:
        with contextlib.suppress(OSError):  # stderr may be closed
            print(f"tpengine: an earlier run's metrics are kept as {writer.kept}", file=sys.stderr)
    if not writer.tensorboard:
        console.print(
            "TensorBoard events are off: pip install 'tpengine[tensorboard]' turns them on",
            markup=False,
            highlight=False,
        )


def _say_what_is_resumed(console: Console, config: Config, checkpoint: Checkpoint | None) -> None:
    """Say at which step the run continues, and which settings differ from those of the checkpoint."""
    if checkpoint is None:
        lines = ["no checkpoint yet: starting at step 1"]
    else:
        step = checkpoint.index.step
        lines = [f"continuing at step {step + 1}" if step < config.train.steps else f"all {step} steps are done"]
        changes = changes_since(checkpoint.index, config)
        threads, saved_threads = torch.get_num_threads(), checkpoint.index.state.get("threads")
        if config.train.reduction == "fast" and saved_threads not in (None, threads):
            changes.append(f"threads per rank from {saved_threads} to {threads}, which may change the last bits")
        lines += [f"changed since the checkpoint: {change}" for change in changes]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _say_where_learning_ends(console: Console, trainer: Trainer) -> None:
    """Warn if the learning-rate schedule ends before the run, as after resuming with more steps."""
    config = trainer.run_config
    if trainer.phases[-1].schedule:
        return  # a schedule of a later phase's own, which is as long as that
    steps, lowest = config.train.steps, config.optim.lr * config.optim.min_lr_ratio
    amounts = (decay_steps_of(config), config.optim.warmup_steps)
    end, warmup = (amount_of(amount, "a schedule") for amount in amounts)
    last = max(end.number, warmup.number + 2)
    if config.optim.schedule != "constant" and end.unit == warmup.unit == "steps" and last < steps:
        line = (
            f"the learning rate is at its end, {lowest:g}, from step {last} on: --optim.decay-steps {steps} would "
            "stretch its schedule over the whole run"
        )
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _write_config(trainer: Trainer, run_dir: Path) -> None:
    """Write config.toml, from which the run can be repeated or continued; keep a different earlier one aside."""
    resolved = replace(
        trainer.run_config,
        run_dir=str(run_dir),
        device="cuda" if trainer.device.type == "cuda" else "cpu",
        resume=False,
    )
    write_config(resolved, run_dir, keeps_equal=trainer.run_config.resume)


def _keep_beginning(job: Job) -> None:
    """Keep, beside the run, what goes with the weights it begins with."""
    if job.run_dir is None or job.checkpoint is not None or job.beginning is None:
        return
    if isinstance(job.beginning, ModelDirectory):
        keep_source(job.beginning, job.run_dir)
    else:
        # A checkpoint lies two folders below its run.
        hand_on(job.beginning[0].parent.parent, job.run_dir)


def _figures(begin: float, run: _Run) -> list[float]:
    """Return what a rank tells the others at the end of a step.

    Its seconds, peak memory, signal, content flag, and whether it still writes a checkpoint. Where the host knows how
    long it waited for other stages (on a CPU), also that, at the place of its stage.
    """
    trainer, memory = run.trainer, peak_memory_bytes(run.job.device)
    flags = float(run.watch.stop), float(run.content.flag), float(run.checkpoints.is_writing)
    figures = [time.perf_counter() - begin, float(memory), *flags]
    if trainer.device.type != "cpu" or trainer.mesh.shape.pp == 1:
        return figures
    waits = [trainer.waited_seconds * (stage == trainer.mesh.at.pp) for stage in range(trainer.mesh.shape.pp)]
    return figures + waits
