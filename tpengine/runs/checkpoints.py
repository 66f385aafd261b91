"""Save a run's checkpoints: every so many steps, at the last step and at a signal to stop; report what was saved."""

from __future__ import annotations

import contextlib
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from tpengine.checkpoint.directory import CheckpointDirectory, Retention
from tpengine.checkpoint.resume import checkpoints_of, state_of
from tpengine.checkpoint.save import Saver
from tpengine.checkpoint.upload import Uploads
from tpengine.config import spike_rule_of
from tpengine.distributed.agreement import all_gather_json, broadcast_json
from tpengine.distributed.process import max_over_ranks
from tpengine.runs.callbacks import Callbacks
from tpengine.training.checkpoint_blocks import blocks_of
from tpengine.training.planned_run import PlannedRun, RunError
from tpengine.training.state_check import check_finite, check_frozen, check_replicas
from tpengine.training.train_state import TrainState

# Training waits for storage for no more than these seconds and this share of its time, all in all: a checkpoint that is
# nearly written is not worth leaving out the next.
_MOST_WAITING_SECONDS, _MOST_WAITING_SHARE = 5.0, 0.02
# After a request to stop, an upload command has so long.
_UPLOAD_SECONDS = 60.0
# How long a failed rank waits for a checkpoint that is being written; if a peer is gone, writing fails much sooner.
_LAST_WRITE_SECONDS = 10.0
_WORDS = {signal.SIGINT: "interrupted", signal.SIGHUP: "hung up", signal.SIGTERM: "terminated"}


class RunCheckpoints:
    """The checkpoints of one run; the constructor is collective. Leaving the context waits for what is being written.

    Args:
        state: what is saved.
        planned: the run.
        run_dir: the run's directory on rank 0; None elsewhere.
        callbacks: of the run; None for none.
        loss: the name of a loss of the user's own; empty for the next token's.

    Attributes:
        uploads: runs --train.after-checkpoint on rank 0; None elsewhere, and without it. Whoever has left the context
            without an error finishes it.

    Raises:
        RunError: on all ranks alike: checkpoints are asked for, and rank 0 cannot write to its directory or a rank does
            not see it.
    """

    def __init__(
        self,
        state: TrainState,
        planned: PlannedRun,
        run_dir: Path | None,
        callbacks: Callbacks | None = None,
        loss: str = "",
    ) -> None:
        self._state, self._planned, self._train = state, planned, planned.config.train
        self._callbacks, self._loss = callbacks, loss
        self._saved_step: int | None = None
        # Of the checkpoint that is being written.
        self._written_step: int | None = None
        self._failure: str | None = None
        self._saver: Saver | None = None
        self.uploads: Uploads | None = None
        self._began_at, self._waited_seconds = time.monotonic(), 0.0
        if self._train.checkpoint_every:
            train, directory = self._train, _agree_on_directory(run_dir)
            rule = spike_rule_of(train.spike)
            window = rule.window if rule is not None and rule.action == "rollback" else 0
            besides = Retention(train.keep_every, train.keep_best, window)
            if train.after_checkpoint and run_dir is not None:
                remove_old = partial(besides.remove_others, directory, train.keep_checkpoints)
                self.uploads = Uploads(train.after_checkpoint, directory, run_dir, _say, remove_old)
            told = None if self.uploads is None else self.uploads.offer
            self._saver = Saver(directory, train.keep_checkpoints, besides, told, _say)

    def __enter__(self) -> RunCheckpoints:
        if self.uploads is not None:
            self.uploads.offer_again()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, RunError):
            # Wait: a writing thread that used its group while the groups are destroyed would crash the process.
            self.wait()
        elif self._saver is not None:
            # This rank has failed, and its report names the current activity, so keep that. Wait a little, so that the
            # ranks that are alive can complete the checkpoint.
            self._saver.wait(_LAST_WRITE_SECONDS)
        if kind is not None and self.uploads is not None:
            self.uploads.finish(0.0)

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes the checkpoint before."""
        return self._saver is not None and self._saver.is_writing()

    def after_step(self, num_steps: int, held_out_loss: float | None = None, is_writing: bool = False) -> None:
        """Begin to save if a checkpoint is due; otherwise compare replicas if that is due.

        Training does not wait for storage: a checkpoint that is due while the one before is still being written is left
        out, unless it is the last, or the one before is complete in a moment.

        Args:
            num_steps: steps that are done.
            held_out_loss: of the weights that are saved; None where this step is not evaluated. The index keeps it.
            is_writing: whether some rank's `is_writing` was true at the end of the step, the same on all ranks; without
                it this waits for the checkpoint before.

        Raises:
            RunError: on all ranks alike: what would be saved is not finite, or replicas differ.
        """
        if self._callbacks is not None and self._callbacks.are_given and self._written_step and not is_writing:
            # It is on disk, and callbacks hear of it.
            self.wait()
        every, last = self._train.checkpoint_every, self._train.steps
        is_due = bool(every) and (num_steps % every == 0 or num_steps == last)
        if is_due and not (is_writing and num_steps != last and self._must_leave_out(num_steps)):
            self._save(num_steps, held_out_loss)
        elif self._train.check_replicas_every and num_steps % self._train.check_replicas_every == 0:
            self._state.rank.activity.begin("comparing replicas")
            check_replicas(self._state, num_steps, masters_only=True)
            check_frozen(self._state, num_steps)

    def save_and_say(
        self,
        num_steps: int,
        stop_signal: int,
        held_out_loss: float | None = None,
        seconds_left: Callable[[float], float] = lambda most: most,
        saved: Callable[[str], None] = lambda _: None,
    ) -> str:
        """Save now, because a signal asked the run to stop, and wait until it is on disk and uploaded.

        Args:
            num_steps, held_out_loss: as `after_step`.
            stop_signal: what asked.
            seconds_left: returns how long this rank can stay, at most as long as it is given: rank 0 waits no longer
                for the upload command, and all others wait for rank 0.
            saved: is told, as soon as the checkpoint is on disk, the end of a message that says so.

        Returns:
            The message for the user.

        Raises:
            RunError: as `after_step`.
        """
        number = signal.Signals(stop_signal)
        what = _WORDS.get(number, f"asked to stop by {number.name}")
        done = f"{what} after step {num_steps} of {self._train.steps}"
        if self._saver is None:
            return f"{done}: nothing is saved, as --train.checkpoint-every 0 says"
        self._save(num_steps, held_out_loss)
        self.wait()
        if self._failure is None:
            saved(self.where())
        if self._train.after_checkpoint:
            self._state.rank.activity.begin("waiting for --train.after-checkpoint", timed=False)
            if self.uploads is not None:
                self.uploads.finish(seconds_left(_UPLOAD_SECONDS))
            # Who leaves first has torchrun end the others.
            broadcast_json(None)
        return f"{done}{self.where()}"

    def save_before_leaving(self, num_steps: int) -> str:
        """Save because the run cannot go on although the step is done; return the end of a message."""
        if self._saver is None:
            return ""
        self._save(num_steps, None)
        self.wait()
        return self.where()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is on disk."""
        if self._saver is not None:
            self._state.rank.activity.begin("waiting for a checkpoint to be written", timed=False)
            self._note(self._saver.wait())

    def newest(self) -> Path | None:
        """Return the newest checkpoint; None if there is none, or none is saved."""
        return self._saver.directory.newest() if self._saver is not None else None

    def where(self) -> str:
        """Return the end of a message: the newest checkpoint, and how to continue from it."""
        newest = self.newest()
        if newest is None:
            return ": no checkpoint is saved"
        return f": saved in {newest}; continue with --run-dir {shlex.quote(str(newest.parents[1]))} --resume"

    def raise_if_the_last_is_missing(self) -> None:
        """Raise if the run's last state is not on disk: training is over, so that nothing will try again.

        Raises:
            RunError: on all ranks alike.
        """
        if self._failure is not None:
            raise RunError(f"the last checkpoint must be written: {self._failure}{self.where()}")

    def _must_leave_out(self, num_steps: int) -> bool:
        """Wait a moment for the checkpoint before; return whether some rank still writes it; collective."""
        assert self._saver is not None
        self._state.rank.activity.begin("waiting for the checkpoint before", timed=False)
        begin = time.monotonic()
        most = _MOST_WAITING_SECONDS + _MOST_WAITING_SHARE * (begin - self._began_at)
        is_writing = self._saver.is_writing(max(0.0, most - self._waited_seconds))
        (anybody_writes,) = max_over_ranks([float(is_writing)], self._state.rank.device)
        self._waited_seconds += time.monotonic() - begin
        if anybody_writes and dist.get_rank() == 0:
            _say(
                f"the checkpoint of step {num_steps} is left out: the one before is still being written, as storage is "
                f"slower than --train.checkpoint-every {self._train.checkpoint_every}"
            )
        return bool(anybody_writes)

    def newest_until(self, step: int) -> int | None:
        """Return the steps of the newest checkpoint of at most so many; None if there is none, or none is saved."""
        steps = self._saver.directory.steps() if self._saver is not None else []
        return max((saved for saved in steps if saved <= step), default=None)

    def go_back(self, step: int) -> str:
        """Remove what was saved after a step, on rank 0; return the problem, if it cannot be removed.

        What is being written must have been waited for.
        """
        self._saved_step = step or None
        if self._saver is None or dist.get_rank() != 0:
            return ""
        if self.uploads is not None:
            self.uploads.go_back(step)
        try:
            self._saver.directory.remove_after(step)
        except OSError as error:
            return (
                f"a rollback must remove the checkpoints that it goes behind: {self._saver.directory.path}: "
                f"{error.strerror}: make it writable"
            )
        return ""

    def _save(self, num_steps: int, held_out_loss: float | None) -> None:
        assert self._saver is not None
        state, planned = self._state, self._planned
        # Wait for the previous checkpoint, which may still be being written.
        state.rank.activity.begin("waiting for the checkpoint before", timed=False)
        self._note(self._saver.wait())
        if self._saved_step == num_steps:
            return
        # Check the state: finite, and equal on replicas.
        state.rank.activity.begin("checking what is to be saved")
        check_finite(state)
        check_replicas(state, num_steps)
        check_frozen(state, num_steps)
        if self._callbacks is not None:
            self._callbacks.before_checkpoint(self._saver.directory.of_step(num_steps), num_steps)
        # Copy it; a thread writes the copy while training goes on.
        state.rank.activity.begin("copying a checkpoint aside", timed=False)
        config = replace(planned.config, device="cuda" if state.rank.device.type == "cuda" else "cpu")
        threads = torch.get_num_threads() if state.rank.device.type == "cpu" else None
        fingerprint = planned.at(max(num_steps - 1, 0)).corpus.fingerprint()
        saved = state_of(config, fingerprint, num_steps, state.num_updates, threads, planned.phases)
        saved["loss_scale"] = state.loss_scale.state()
        if state.spikes.rule is not None:
            saved["spikes"] = state.spikes.state()
        if state.rollbacks:
            saved["rollbacks"] = [rollback.to_json() for rollback in state.rollbacks]
        if held_out_loss is not None:
            saved["held_out_loss"] = held_out_loss
        if self._loss:
            saved["loss"] = self._loss
        self._failure = None
        self._saver.save(num_steps, blocks_of(state), saved)
        self._saved_step = self._written_step = num_steps

    def _note(self, failure: str | None) -> None:
        """Tell callbacks that a checkpoint is on disk; or print and remember why it is not: the run goes on, and the
        next may succeed.
        """
        step, self._written_step = self._written_step, None
        if failure is None:
            if step is not None and self._callbacks is not None:
                assert self._saver is not None
                self._callbacks.after_checkpoint(self._saver.directory.of_step(step), step)
            return
        self._failure = failure
        self._saved_step = None
        if dist.get_rank() == 0:
            _say(f"a checkpoint could not be written: {failure}{self.where()}")


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be closed
        print(f"tpengine: {line}", file=sys.stderr, flush=True)


def _agree_on_directory(run_dir: Path | None) -> CheckpointDirectory:
    """Make rank 0's directory, send its path to all ranks, and check that every rank sees the same directory."""
    own, problem = "", ""
    if run_dir is not None:
        directory = checkpoints_of(run_dir)
        try:
            own = str(_make_ready(directory))
        except OSError as error:
            problem = (
                f"the directory of checkpoints must take files: {directory.path}: {error.strerror}: fix that, or use "
                "another --run-dir or --train.checkpoint-every 0"
            )
    # A path may contain bytes that are not text: os.fsdecode's escapes for them survive JSON.
    own, problem = broadcast_json([own, problem])
    if problem:
        raise RunError(problem)
    token = Path(own)
    path = token.parent
    blind = [rank for rank, sees in enumerate(all_gather_json(_sees(token))) if not sees]
    if run_dir is not None:
        with contextlib.suppress(OSError):
            token.unlink()
    if blind:
        raise RunError(
            f"all ranks must reach the run directory to write checkpoints: ranks {blind} do not see {path}: use a "
            "--run-dir that all nodes share, or --train.checkpoint-every 0"
        )
    # Rank 0 prints the path as the user gave it.
    return checkpoints_of(run_dir) if run_dir is not None else CheckpointDirectory(path)


def _make_ready(directory: CheckpointDirectory) -> Path:
    """Make the directory and a file in it; a host that does not see the file has another directory of that name."""
    directory.clean()
    directory.path.mkdir(exist_ok=True)
    token = directory.path.resolve() / f".seen-{secrets.token_hex(8)}"
    token.touch()
    return token


def _sees(token: Path) -> bool:
    try:
        return token.exists()
    except OSError:
        return False
