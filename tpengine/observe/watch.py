"""The watch: a thread that handles signals and timeouts while the main thread is blocked. No torch.

A rank that is blocked inside a collective runs no Python code, so a Python signal handler would run only when the
collective ends, which may be never. But the interpreter's C handler writes the signal's number into a pipe at once
(signal.set_wakeup_fd), and a daemon thread reads the pipe. Three things can happen; each prints one line of its own:

    a request to stop    SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 (SLURM's notice of preemption), or the end of the
                         process that started the ranks. It is stored in `stop`; the training loop saves at the end of
                         its step and leaves.
    no way to continue   after a request no rank made progress for a while (the pulse), so a peer is gone (torchrun
                         sends SIGTERM to the others as soon as one rank has died). The rank prints what it was doing,
                         and leaves with code 70. While some rank makes progress it waits, unless torchrun is about to
                         kill.
    a hang               an action takes longer than the time limit: the same report and code.

A thread can only end the process with `os._exit`, because it cannot interrupt the main thread. What must survive is on
disk by then (checkpoints are renamed into place, metrics are flushed line by line).

The pulse: whether any rank still makes progress after a request to stop.

A waiting rank cannot distinguish a peer that computes for a long time from one that is gone: both are silent. So all
ranks add to one counter in the store where they met, each only while it makes progress itself. If the sum grows, some
rank makes progress. That is one number for any number of ranks, and one request per second. Before a request to stop,
the thread only asks, every two seconds, whether any rank has been asked.

The thread has its own connection, and the watch only reads a field. So if the store hangs with the rank that keeps it,
nothing else does.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import NoReturn, Protocol

from tpkernels.symmetric.signals import waits_for_peer

from tpengine.distributed.launch import STARTED
from tpengine.last_words import RANK_FAILED, one_line, say
from tpengine.observe.activity import Activity, Doing
from tpengine.terminal import raw

_IDLE_SECONDS = 2.0
_BEAT_SECONDS = 1.0
_LAST_ANSWER_SECONDS = 2.0
_POLL_SECONDS = 0.25
_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# After a request to stop, an action that waits for other ranks may take three times as long as any before it and at
# least 5 s; if none is known, 20 s.
_PATIENCE_SECONDS = (5.0, 20.0)
# torchrun kills the remaining processes 30 s after it has passed on a signal.
_TORCHRUN_SECONDS = 27.0
_PASSED_ON = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # torchrun's default for --signals-to-handle
# A rank that computes uses more CPU time than this between two calls of `moves`, however busy the machine is.
_COMPUTING_SECONDS = 0.01
# A terminal's Ctrl-C arrives twice, because torchrun passes it on too. A person's second Ctrl-C comes later than this.
_SAME_REQUEST_SECONDS = 2.0
_LAST_WORD_SECONDS = 5.0
_KEEPING_SECONDS = 1.0
# A rank that has not been seen to wait for a peer for so long does something else.
_LATELY_SECONDS = 2.0
_LONGEST_LINE = 1000


class Store(Protocol):
    """The store that all ranks share."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0; return the sum."""


class Pulse:
    """One rank's part; a context manager that runs the thread.

    Args:
        store: a connection that nothing else uses.
        asked: returns whether this rank has been asked to stop.
        moves: returns whether this rank has made progress since the last call.
        clock: seconds; only differences matter.

    Attributes:
        moved_at: when this rank last learned that some rank makes progress; minus infinity before that.
    """

    def __init__(
        self,
        store: Store,
        asked: Callable[[], bool],
        moves: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._asked, self._moves, self._clock = store, asked, moves, clock
        self.moved_at = float("-inf")
        self._has_told = self._anybody_asked = False
        self._sum: int | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self.run, name="tpengine-pulse", daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._closing.set()
        self._thread.join(_LAST_ANSWER_SECONDS)

    def beat(self) -> None:
        """Report whether this rank makes progress, and read whether any does."""
        if not self._has_told and self._asked():
            self._has_told = True
            self._store.add("asked to stop", 1)
        if not self._anybody_asked:
            self._anybody_asked = self._store.add("asked to stop", 0) > 0
        if self._anybody_asked:
            total = self._store.add("moves", int(self._moves()))
            if total != self._sum:
                self._sum, self.moved_at = total, self._clock()

    def run(self) -> None:
        """Beat until the pulse is closed or the store is gone; the thread's work."""
        while not self._closing.wait(_BEAT_SECONDS if self._anybody_asked else _IDLE_SECONDS):
            try:
                self.beat()
            except RuntimeError:
                return  # the store is gone with the process that kept it; the watch continues without the pulse


class Watch:
    """Handles requests to stop and timeouts; a context manager, entered in the main thread.

    Args:
        rank: this rank, for messages.
        activity: what the main thread does, how long that may take, and what is known of the ranks that it waits for.
        clock: seconds on the scale of time.monotonic, which `activity` uses.

    Attributes:
        activity: as given.
        stop: the signal that asked this rank to stop; 0 until then. The training loop reads it between steps.
        parent: the process that started this rank and its like (torchrun, or `tpengine train --nproc`), whose end is a
            request to stop; None without one.
    """

    def __init__(self, rank: int, activity: Activity, clock: Callable[[], float] = time.monotonic) -> None:
        self._rank, self.activity = rank, activity
        self.stop = 0
        self.parent: int | None = None
        self._pulse: Pulse | None = None
        self._clock = clock
        self._stopped_at = self._polled_at = 0.0
        self._seen, self._seen_cpu_seconds = activity.now, 0.0
        self._leaving = threading.Lock()
        self._handlers: dict[signal.Signals, object] = {}

    def __enter__(self) -> Watch:
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
        # The pipe receives only signals that Python handles.
        for number in _REQUESTS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP, and it stays ignored
                self._handlers[number] = signal.signal(number, lambda *_: None)
        self._previous_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self.parent = os.getppid() if os.environ.keys() & {"TORCHELASTIC_RUN_ID", STARTED} else None
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

    @contextlib.contextmanager
    def pulsing(self, store: Store, computes_on_cores: bool) -> Iterator[None]:
        """Ask the other ranks after a request to stop, inside the context, whether any of them makes progress.

        Args:
            store: as Pulse's.
            computes_on_cores: as `moves` takes it.
        """
        with Pulse(store, lambda: bool(self.stop), partial(self.moves, computes_on_cores)) as self._pulse:
            yield
        self._pulse = None

    def report_and_leave(self, reason: str) -> NoReturn:
        """Print why this rank cannot continue, what it was doing and what it waited for; leave with 70. Any thread."""
        doing = self.activity.now
        self._keep_briefly(reason, doing)
        self.leave(RANK_FAILED, f"rank {self._rank} ends: {reason}: {self._describe(doing)}")

    def _keep_briefly(self, reason: str, doing: Doing) -> None:
        # The wait for a peer may have given up by the same limit a moment ago.
        polls_no_peer = self._clock() - max(self._polled_at, doing.began_at) > _LATELY_SECONDS

        def keep() -> None:
            with contextlib.suppress(Exception):
                self.activity.ranks.keep(reason, doing, polls_no_peer)

        # A disk may be what blocks the run.
        thread = threading.Thread(target=keep, name="tpengine-last-words", daemon=True)
        thread.start()
        thread.join(_KEEPING_SECONDS)

    def seconds_left(self, most: float) -> float:
        """Return how long this rank can stay after a request to stop: `most`, or less where torchrun will kill it."""
        if not self.stop or self.parent is None or not self._torchrun_kills():
            return most
        return max(0.0, min(most, self._stopped_at + _TORCHRUN_SECONDS - self._clock()))

    def _torchrun_kills(self) -> bool:
        """Whether torchrun passes on the signal that this rank has heard, and so kills what is left 30 s later."""
        if STARTED in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
            return False  # who started this rank waits for as long as it takes
        passes_on = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", _PASSED_ON).split(",")
        return signal.Signals(self.stop).name in passes_on

    def leave_stopped(self, number: int, message: str) -> NoReturn:
        """Leave because some rank was asked to stop, with 128 + the signal; rank 0 prints the message. After saving."""
        self.leave(128 + number, message if self._rank == 0 else "")

    def moves(self, computes_on_cores: bool = True) -> bool:
        """Return whether this rank has made progress since the last call; only the pulse's thread may call it.

        It has if it has begun something else, if its activity is not timed or waits for no rank, or if the main thread
        computes: it has used CPU time and is not in a wait that also uses CPU time.

        Args: computes_on_cores: whether CPU time shows that this rank computes; not if it waits for a GPU.
        """
        doing, before = self.activity.now, self._seen
        main = threading.main_thread().ident
        assert main is not None
        cpu_seconds = time.clock_gettime(time.pthread_getcpuclockid(main))
        used, self._seen_cpu_seconds, self._seen = cpu_seconds - self._seen_cpu_seconds, cpu_seconds, doing
        if doing is not before or not doing.timed or not self.activity.ranks.waits(doing.what):
            return True
        computes = computes_on_cores and used > _COMPUTING_SECONDS
        return computes and not waits_for_peer(sys._current_frames().get(main))

    def _describe(self, doing: Doing) -> str:
        seconds = self._clock() - doing.began_at
        step = "" if self.activity.step is None else f"step {self.activity.step + 1}, "
        try:
            waits = self.activity.ranks.explain(doing.what)
        except Exception as error:  # the report must be printed whatever else is broken
            waits = f" (whom it waited for is unknown: {error!r})"
        return f"{step}in {doing.what} for {seconds:.1f} s{waits}"

    def _run(self) -> None:
        while not self._closing:
            ready, _, _ = select.select([self._read_end], [], [], _POLL_SECONDS)
            if ready:
                with contextlib.suppress(BlockingIOError):
                    for number in os.read(self._read_end, 64):
                        self.hear(number)
            if self.parent is not None and os.getppid() != self.parent:
                self.parent = None
                self.hear(signal.SIGTERM)  # who started the ranks is gone, so no further signal will be passed on
            self._look_at_the_main_thread()
            self.look_at_the_clock()

    def _look_at_the_main_thread(self) -> None:
        """Note when it was last seen to wait for a peer's memory, if it has been in one activity for long."""
        now = self._clock()
        if now - self.activity.now.began_at < _LATELY_SECONDS / 2:
            return
        if waits_for_peer(sys._current_frames().get(threading.main_thread().ident or 0)):
            self._polled_at = now

    def hear(self, number: int) -> None:
        """Take note of a signal, or leave if nobody will read `stop`; called by the thread."""
        if number not in _REQUESTS:
            return
        if not self.activity.stoppable:
            self.stop = number
            if number == signal.SIGINT:
                self.leave(128 + number, f"interrupted{self.activity.last_checkpoint}" if self._rank == 0 else "")
            if self.activity.step is None and self._rank != 0:
                self.leave(128 + number, "")  # all ranks start together: the rank with the error has printed it
            name = signal.Signals(number).name
            self.leave(128 + number, f"rank {self._rank} ends: {name}: {self._describe(self.activity.now)}")
        if not self.stop:
            self.stop, self._stopped_at = number, self._clock()
        elif number == signal.SIGINT and self._clock() - self._stopped_at > _SAME_REQUEST_SECONDS:
            what = self.activity.last_checkpoint or ": this step is lost"
            self.leave(128 + number, f"interrupted again{what}" if self._rank == 0 else "")

    def look_at_the_clock(self) -> None:
        """Leave if an activity takes too long, or if nobody moves after a request to stop; called by the thread."""
        doing, now = self.activity.now, self._clock()
        if not doing.timed:
            return
        limit = self.activity.timeout_seconds
        if limit and now - doing.began_at > limit:
            self.report_and_leave(f"--train.timeout-seconds {limit:g} is over")
        if not (self.stop and self.activity.stoppable and self.activity.ranks.waits(doing.what)):
            return
        name = signal.Signals(self.stop).name
        moved_at = max(doing.began_at, self._stopped_at, self._pulse.moved_at if self._pulse else 0.0)
        patience = self._patience_seconds()
        if now - moved_at > patience:
            self.report_and_leave(f"{name}, and nothing moved for {patience:.0f} s after it")
        if self.parent is not None and self._torchrun_kills() and now - self._stopped_at > _TORCHRUN_SECONDS:
            self.report_and_leave(f"{name}, and torchrun kills what is left 30 s after it")

    def _patience_seconds(self) -> float:
        least, unknown = _PATIENCE_SECONDS
        longest = self.activity.longest_seconds
        return max(least, 3 * longest) if longest else unknown

    def leave(self, code: int, line: str) -> NoReturn:
        """Print a line, unless it is empty, and end the process with an exit code; any thread."""
        # The main thread and this one may both want to leave: one prints, the other waits for the end. The timeout ends
        # the process even if printing to the terminal blocks.
        if self._leaving.acquire(timeout=_LAST_WORD_SECONDS):
            with contextlib.suppress(Exception):
                if self._rank == 0 and sys.stdout.isatty():
                    raw(sys.stdout).write("\x1b[?25h\n")  # a progress line hides the cursor
                    sys.stdout.flush()
            with contextlib.suppress(Exception):
                if line:
                    say(one_line(line)[:_LONGEST_LINE])
        os._exit(code)
