"""The command that is run for complete checkpoints, --train.after-checkpoint: on rank 0, beside training. No torch.

One runs at a time. If checkpoints are complete sooner than it ends, the newest one waits and the older ones are left
out, which is said. Whatever becomes of it, training goes on.

    <run_dir>/after_checkpoint.jsonl    a line for each that has ended: step, exit code, seconds, its last line of text

A command lives no longer than its rank (guardian.py), so that two runs of it never meet. One that was ended, or failed
for the newest checkpoint, is run again when the run is resumed.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from tpengine import journal
from tpengine.checkpoint import guardian
from tpengine.checkpoint.directory import CheckpointDirectory
from tpengine.last_words import one_line
from tpengine.trust import permitted_command

JOURNAL = "after_checkpoint.jsonl"
_FLAG = "--train.after-checkpoint"
_PLACE = "{path}"
_LAST_BYTES = 4096
_LONGEST_TEXT = 300


def check_program(command: str) -> None:
    """Check, on the rank that will run it, that a command's program is there.

    Args: command: legal words (config/rules.py), or empty.
    Raises: ValueError: it is not, or the user has not permitted it (trust.py).
    """
    if permitted_command(command) and shutil.which(program := shlex.split(command)[0]) is None:
        raise ValueError(
            f"train.after_checkpoint must name a program of rank 0's host: {program} is not found: install it, or give "
            "its path"
        )


class Uploads:
    """Runs a command for complete checkpoints.

    Args:
        command: as --train.after-checkpoint has it; `{path}` stands for the checkpoint's absolute path.
        directory: of the checkpoints.
        run_dir: for the journal.
        say: prints a line for the user; called by a thread too.
        remove_old: removes the checkpoints that were spared for the command and do not stay; called once no command
            runs any more. Returns the problem, or nothing.

    Raises:
        ValueError: the user has not permitted the command (trust.py).
    """

    def __init__(
        self,
        command: str,
        directory: CheckpointDirectory,
        run_dir: Path,
        say: Callable[[str], None],
        remove_old: Callable[[], str] = lambda: "",
    ) -> None:
        self._words, self._directory, self._say = shlex.split(permitted_command(command)), directory, say
        self._remove_old = remove_old
        self._journal = run_dir / JOURNAL
        self._lock = threading.Condition()
        self._running: int | None = None
        self._waiting: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._newest: int | None = None
        self._is_closed = False

    def offer_again(self) -> None:
        """Offer the newest checkpoint of a run that is resumed, unless the command has done its work for it."""
        steps = self._directory.steps()
        # A checkpoint of step 0 was imported.
        if steps and steps[-1] and steps[-1] not in done_steps(self._journal):
            self.offer(steps[-1])

    def offer(self, step: int) -> frozenset[int]:
        """Have the command run for a checkpoint, which is the newest, as soon as none runs.

        Returns:
            The checkpoints that must stay because the command reads them now. Later it only begins with the newest.
        """
        with self._lock:
            if self._is_closed:
                return frozenset()
            left_out, self._waiting, self._newest = self._waiting, step, step
            if self._running is None and left_out is None:
                threading.Thread(target=self._work, name="tpengine-upload", daemon=True).start()
            running = frozenset() if self._running is None else frozenset([self._running])
        if left_out is not None:
            name = self._directory.of_step(left_out).name
            self._say(f"{_FLAG} is left out for {name}: it is slower than checkpoints come, and a newer one waits")
        return running

    def go_back(self, step: int) -> None:
        """Forget the checkpoints after a step, which are removed: later ones of the same steps are others.

        A command that reads one of them is ended, and waited for.
        """
        with self._lock:
            if self._waiting is not None and self._waiting > step:
                self._waiting = None
            if self._running is not None and self._running > step:
                if self._process is not None and self._process.stdin is not None:
                    self._process.stdin.close()
                self._lock.wait_for(lambda: self._running is None)
            if self._newest is not None and self._newest > step:
                self._newest = None
        with contextlib.suppress(OSError):
            lines = journal.read(self._journal)
            journal.write(self._journal, [line for line in lines if line.step is not None and line.step <= step])

    def finish(self, seconds: float | None = None) -> None:
        """Wait for what runs and what waits, and say what became of the newest; then run no more.

        No checkpoint may be being written, unless there is no time left: then old ones stay.

        Args:
            seconds: after these a command that runs is ended; None for no limit.
        """
        with self._lock:
            newest = self._newest
            if newest is not None and not self._is_idle() and seconds != 0:
                self._say(f"waiting for {_FLAG} of {self._directory.of_step(newest).name}")
            if not self._lock.wait_for(self._is_idle, seconds):
                self._close()
                self._lock.wait_for(self._is_idle)
            self._is_closed = True
        if newest is None:
            return
        if seconds != 0 and (problem := self._remove_old()):
            self._say(problem)
        name = self._directory.of_step(newest).name
        if newest in done_steps(self._journal):
            self._say(f"{_FLAG} of {name} is done")
        elif seconds is not None:
            self._say(f"{_FLAG} of {name} is not done: it is run again when the run is resumed")

    def _is_idle(self) -> bool:
        return self._running is None and self._waiting is None

    def _close(self) -> None:
        """End what runs, with all that it has started."""
        self._is_closed, self._waiting = True, None
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def _work(self) -> None:
        """The thread: run the command as long as a checkpoint waits."""
        while True:
            with self._lock:
                self._running, self._waiting = self._waiting, None
                self._lock.notify_all()
                if self._running is None:
                    return
                step = self._running
            try:
                self._run(step)
            except Exception as error:  # no disk for its output, no more processes
                self._say_failure(step, one_line(str(error)))

    def _run(self, step: int) -> None:
        path = str(self._directory.of_step(step).absolute())
        words = [word.replace(_PLACE, path) for word in self._words]
        begin = time.monotonic()
        with tempfile.TemporaryFile() as output:
            code = self._call(words, output)
            text = _last_line(output)
        if code:
            self._say_failure(step, f"exit code {code}{f': {text}' if text else ''}")
        row = {"step": step, "exit_code": code, "seconds": round(time.monotonic() - begin, 3), "text": text}
        try:
            journal.append(self._journal, row)
        except OSError as error:
            self._say(f"{self._journal} cannot be written: {error.strerror}")

    def _call(self, words: Sequence[str], output: IO[bytes]) -> int:
        """Run a command to its end, or until `_close`; return its exit code."""
        guarded = [sys.executable, "-I", "-S", guardian.__file__, *words]
        with self._lock:
            if self._is_closed:
                return -1
            self._process = subprocess.Popen(
                guarded, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )
        code = self._process.wait()
        with self._lock, contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process = None
        return code

    def _say_failure(self, step: int, what: str) -> None:
        if not self._is_closed:
            self._say(f"{_FLAG} failed for {self._directory.of_step(step).name}: {what}: the run goes on")


def done_steps(path: Path) -> set[int]:
    """Return the steps for which the command has ended with code 0; lines that are anything else are skipped."""
    with contextlib.suppress(OSError):
        lines = journal.read(path)
        return {line.step for line in lines if line.step is not None and line.row.get("exit_code") == 0}
    return set()


def _last_line(output: IO[bytes]) -> str:
    """Return the last line of a text that is not empty."""
    output.seek(max(0, output.seek(0, 2) - _LAST_BYTES))
    lines = output.read().decode(errors="replace").split("\n")
    text = next((line.strip() for line in reversed(lines) if line.strip()), "")
    # What controls a terminal stays out of the run's lines.
    return "".join(c if c.isprintable() else " " for c in text)[:_LONGEST_TEXT]
