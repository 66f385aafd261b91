"""The watch: a thread that hears signals and the clock while the main thread is deaf.

A rank blocked inside a collective runs no Python: a signal handler of Python's own would wait for the very thing that
never comes. The interpreter's C handler, however, writes the signal's number into a pipe at once
(signal.set_wakeup_fd), and a daemon thread reads it. Three things can happen, each with one line of its own:

    a request to stop    SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 (SLURM's notice of preemption), or the end of the
                         torchrun that started this rank: noted in `stop`. The training loop saves at the end of its
                         step and leaves.
    no way to go on      after a request nothing moved for a while: a peer is gone (torchrun sends SIGTERM to the rest
                         as soon as one rank has died). The rank says what it was doing, and leaves with 70.
    a hang               an action outlives the time limit: the same.

`os._exit` is the way out of a thread: the main thread cannot be told. What must survive is on disk by then
(checkpoints are renamed into place, metrics are flushed by the line).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from tpengine.activity import Activity, Doing
from tpengine.exits import RANK_FAILED, one_line, say

_POLL_SECONDS = 0.25
_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# After a request to stop, an action that waits for other ranks may take three times as long as any before it, within
# these bounds: torchrun kills what is left 30 s after its SIGTERM.
_PATIENCE_SECONDS = (5.0, 20.0)
# torchrun passes on to its ranks what the terminal has already sent them; a person's second Ctrl-C comes later.
_SAME_REQUEST_SECONDS = 2.0
_LAST_WORD_SECONDS = 5.0
_LONGEST_LINE = 1000


class Watch:
    """Hears requests to stop and the clock; a context manager, entered in the main thread.

    Args:
        rank: this rank, for messages.
        activity: what the main thread does.

    Attributes:
        activity: the one given.
        stop: the signal that asked this rank to stop; 0 until then. The training loop reads it between steps.
        stoppable: whether the training loop is running, and so will look at `stop`. While it is not, a signal ends the
            process at once with 128 + its number.
        timeout_seconds: how long a timed activity may take; 0 for ever.
        waits: whether what it does can only end if other ranks act; a rank that computes is never given up.
        explain: what the rank waits for, in words, for the report: (what it does) -> ", waiting for rank 3 (pp)".
        parting: ends the line of rank 0 when an interrupt ends it at once: what is left on disk.
    """

    def __init__(self, rank: int, activity: Activity) -> None:
        self._rank, self.activity = rank, activity
        self.stop = 0
        self.stoppable = False
        self.timeout_seconds = 0.0
        self.waits: Callable[[object], bool] = lambda _: True
        self.explain: Callable[[object], str] = lambda _: ""
        self.parting = ""
        self._stopped_at = 0.0
        self._leaving = threading.Lock()
        self._handlers: dict[signal.Signals, object] = {}

    def __enter__(self) -> Watch:
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
        # The pipe receives only signals that Python handles.
        for number in _REQUESTS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
                self._handlers[number] = signal.signal(number, lambda *_: None)
        self._previous_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tpengine-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._closing = True
        os.write(self._write_end, b"\0")
        self._thread.join()
        signal.set_wakeup_fd(self._previous_fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._read_end)
        os.close(self._write_end)

    def report_and_leave(self, reason: str) -> NoReturn:
        """Say why this rank cannot go on, what it was doing and whom it waited for; leave with 70. Any thread."""
        doing = self.activity.now
        self._leave(RANK_FAILED, f"rank {self._rank} ends: {reason}: {self._describe(doing)}")

    def leave_stopped(self, number: int, message: str) -> NoReturn:
        """Leave as a signal to some rank asked, with 128 + its number; rank 0 says the message. After saving."""
        self._leave(128 + number, message if self._rank == 0 else "")

    def _describe(self, doing: Doing) -> str:
        seconds = time.monotonic() - doing.began_at
        step = "" if self.activity.step is None else f"step {self.activity.step + 1}, "
        try:
            waits = self.explain(doing.what)
        except Exception as error:  # the report must come out whatever is broken
            waits = f" (whom it waited for is unknown: {error!r})"
        return f"{step}in {doing.what} for {seconds:.1f} s{waits}"

    def _run(self) -> None:
        while not self._closing:
            ready, _, _ = select.select([self._read_end], [], [], _POLL_SECONDS)
            if ready:
                with contextlib.suppress(BlockingIOError):
                    for number in os.read(self._read_end, 64):
                        self._hear(number)
            if self._parent is not None and os.getppid() != self._parent:
                self._parent = None
                self._hear(signal.SIGTERM)  # torchrun is gone, and nobody will pass on anything any more
            self._look_at_the_clock()

    def _hear(self, number: int) -> None:
        if number not in _REQUESTS:
            return
        if not self.stoppable:
            self.stop = number
            if number == signal.SIGINT:
                self._leave(128 + number, f"interrupted{self.parting}" if self._rank == 0 else "")
            if self.activity.step is None and self._rank != 0:
                self._leave(128 + number, "")  # ranks start together: who found an error has said it
            name = signal.Signals(number).name
            self._leave(128 + number, f"rank {self._rank} ends: {name}: {self._describe(self.activity.now)}")
        if not self.stop:
            self.stop, self._stopped_at = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._stopped_at > _SAME_REQUEST_SECONDS:
            self._leave(128 + number, f"interrupted again: this step is lost{self.parting}" if self._rank == 0 else "")

    def _look_at_the_clock(self) -> None:
        doing, now = self.activity.now, time.monotonic()
        if not doing.timed:
            return
        if self.timeout_seconds and now - doing.began_at > self.timeout_seconds:
            self.report_and_leave(f"--train.timeout-seconds {self.timeout_seconds:g} is over")
        if self.stop and self.stoppable:
            low, high = _PATIENCE_SECONDS
            longest = self.activity.longest_seconds
            patience = min(max(low, 3 * longest), high) if longest else high
            if now - max(doing.began_at, self._stopped_at) > patience and self.waits(doing.what):
                name = signal.Signals(self.stop).name
                self.report_and_leave(f"{name}, and nothing moved for {patience:.0f} s after it")

    def _leave(self, code: int, line: str) -> NoReturn:
        # The main thread and this one may both have found out: one speaks, the other waits for the end. Whatever has
        # become of the terminal, the process ends.
        if self._leaving.acquire(timeout=_LAST_WORD_SECONDS):
            with contextlib.suppress(Exception):
                if self._rank == 0 and sys.stdout.isatty():
                    sys.stdout.write("\x1b[?25h\n")  # a progress line hides the cursor
                    sys.stdout.flush()
            with contextlib.suppress(Exception):
                if line:
                    say(one_line(line)[:_LONGEST_LINE])
        os._exit(code)
