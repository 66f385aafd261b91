"""The watch: a thread that handles signals and timeouts while the main thread is blocked.

A rank blocked inside a collective runs no Python: a signal handler of Python's own would wait for the very thing that
never comes. The interpreter's C handler, however, writes the signal's number into a pipe at once
(signal.set_wakeup_fd), and a daemon thread reads it. Three things can happen, each with one line of its own:

    a request to stop    SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 (SLURM's notice of preemption), or the end of the
                         torchrun that started this rank: noted in `stop`. The training loop saves at the end of its
                         step and leaves.
    no way to go on      after a request no rank moved for a while (pulse.py): a peer is gone (torchrun sends SIGTERM to
                         the rest as soon as one rank has died). The rank says what it was doing, and leaves with 70.
                         As long as some rank moves it waits, unless torchrun is about to kill it.
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

from tpkernels.symmetric.signals import waits_for_peer

from tpengine.last_words import RANK_FAILED, one_line, say
from tpengine.observe.activity import Activity, Doing
from tpengine.observe.pulse import Pulse

_POLL_SECONDS = 0.25
_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# After a request to stop, an action that waits for other ranks may take three times as long as any before it and at
# least 5 s; if none is known, 20 s.
_PATIENCE_SECONDS = (5.0, 20.0)
# torchrun kills what is left 30 s after it has passed a signal on.
_TORCHRUN_SECONDS = 27.0
_PASSED_ON = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # unless --signals-to-handle says others
# A rank that computes takes more of a core than this between two looks, however busy the machine is.
_COMPUTING_SECONDS = 0.01
# torchrun passes on to its ranks what the terminal has already sent them; a person's second Ctrl-C comes later.
_SAME_REQUEST_SECONDS = 2.0
_LAST_WORD_SECONDS = 5.0
_LONGEST_LINE = 1000


class Watch:
    """Hears requests to stop and the clock; a context manager, entered in the main thread.

    Args:
        rank: this rank, for messages.
        activity: what the main thread does.
        clock: seconds on time.monotonic's scale, which is the activity's.

    Attributes:
        activity: the one given.
        stop: the signal that asked this rank to stop; 0 until then. The training loop reads it between steps.
        stoppable: whether the training loop is running, and so will look at `stop`. While it is not, a signal ends the
            process at once with 128 + its number.
        timeout_seconds: how long a timed activity may take; 0 for ever.
        waits: whether what it does can only end if other ranks act; a rank that computes is never given up.
        explain: what the rank waits for, in words, for the report: (what it does) -> ", waiting for rank 3 (pp)".
        pulse: when some rank moved last, after a request to stop; None for one process.
        computes_on_cores: whether time on a core shows that this rank computes; not so where it waits for a GPU.
        parting: ends the line of rank 0 when an interrupt ends it at once: what is left on disk.
    """

    def __init__(self, rank: int, activity: Activity, clock: Callable[[], float] = time.monotonic) -> None:
        self._rank, self.activity = rank, activity
        self.stop = 0
        self.stoppable = False
        self.timeout_seconds = 0.0
        self.waits: Callable[[object], bool] = lambda _: True
        self.explain: Callable[[object], str] = lambda _: ""
        self.pulse: Pulse | None = None
        self.computes_on_cores = True
        self.parting = ""
        self._clock = clock
        self._stopped_at = 0.0
        self._parent: int | None = None
        self._seen, self._seen_cpu_seconds = activity.now, 0.0
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

    def moves(self) -> bool:
        """Whether this rank has done something since it was last asked this; for the pulse, whose thread alone may ask.

        It has if it has begun something else, if what it does is not timed or waits for nobody, or if the main thread
        computes: it has taken time on a core, and stands in no wait that takes time, too.
        """
        doing, before = self.activity.now, self._seen
        main = threading.main_thread().ident
        assert main is not None
        cpu_seconds = time.clock_gettime(time.pthread_getcpuclockid(main))
        used, self._seen_cpu_seconds, self._seen = cpu_seconds - self._seen_cpu_seconds, cpu_seconds, doing
        if doing is not before or not doing.timed or not self.waits(doing.what):
            return True
        computes = self.computes_on_cores and used > _COMPUTING_SECONDS
        return computes and not waits_for_peer(sys._current_frames().get(main))

    def _describe(self, doing: Doing) -> str:
        seconds = self._clock() - doing.began_at
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
            self.stop, self._stopped_at = number, self._clock()
        elif number == signal.SIGINT and self._clock() - self._stopped_at > _SAME_REQUEST_SECONDS:
            self._leave(128 + number, f"interrupted again: this step is lost{self.parting}" if self._rank == 0 else "")

    def _look_at_the_clock(self) -> None:
        doing, now = self.activity.now, self._clock()
        if not doing.timed:
            return
        if self.timeout_seconds and now - doing.began_at > self.timeout_seconds:
            self.report_and_leave(f"--train.timeout-seconds {self.timeout_seconds:g} is over")
        if not (self.stop and self.stoppable and self.waits(doing.what)):
            return
        name = signal.Signals(self.stop).name
        moved_at = max(doing.began_at, self._stopped_at, self.pulse.moved_at if self.pulse else 0.0)
        patience = self._patience_seconds()
        if now - moved_at > patience:
            self.report_and_leave(f"{name}, and nothing moved for {patience:.0f} s after it")
        passes_on = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", _PASSED_ON).split(",")
        if self._parent is not None and name in passes_on and now - self._stopped_at > _TORCHRUN_SECONDS:
            self.report_and_leave(f"{name}, and torchrun kills what is left 30 s after it")

    def _patience_seconds(self) -> float:
        least, unknown = _PATIENCE_SECONDS
        longest = self.activity.longest_seconds
        return max(least, 3 * longest) if longest else unknown

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
