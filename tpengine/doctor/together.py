"""Looks that all ranks take, one after the other: each is bounded, and who fails is said by rank.

A look may hang in a library, or end a rank. So ranks tell each other what came of it over the store where they met, and
rank 0 decides what all of them take as its answers: what a rank said, that it died, or that it did not answer in time.
A rank that hangs inside a library cannot leave by itself: a thread of its own says so after the look's limit, and ends
the process; that of rank 0 lets the caller print first what is known by then.

The decision a reader will question: after a rank has died, or was missed, nothing more is tried. What follows would
wait for it, and what started the ranks ends them within seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tpkernels.symmetric.processes import lives

from tpengine.distributed.launch import Launch
from tpengine.last_words import RANK_FAILED, one_line, say

_POLL_SECONDS = 0.02
# Behind a look's limit: until every rank's own thread has said that it hangs.
_GRACE_SECONDS = 10.0
# A rank that leaves stays so long for its words to arrive.
_LEAVING_SECONDS = 1.0


@dataclass(frozen=True)
class Answer:
    """What came of a look on one rank.

    Attributes:
        value: what it found; None where it failed.
        error: why it failed, in one line; empty where it did not.
        is_gone: the rank died or did not answer.
        seconds: until then; of several that failed the first is the cause.
    """

    value: Any = None
    error: str = ""
    is_gone: bool = False
    seconds: float = field(default=0.0, compare=False)


class Together:
    """One rank's part in the looks of all.

    Args:
        launch: this rank's place.
        store: where the ranks have met.
        another: opens a connection to the same store for the thread, which must not wait for this rank's calls.
        leave: called by rank 0's thread with what hangs, before it ends the process: prints what is known.
        tell: called on rank 0 with the name of each look as it begins; a log is silent for minutes otherwise.

    Attributes:
        broken: why looks at what needs all ranks are not tried any more; empty while they are.
        is_over: a rank is gone: nothing more is tried.

    Use it as a context manager, in the main thread: its thread hears SIGTERM meanwhile, by which a launcher ends the
    ranks that another has left behind.
    """

    def __init__(
        self,
        launch: Launch,
        store: Any,
        another: Callable[[], Any],
        leave: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        self._launch, self._store, self._another, self._leave = launch, store, another, leave
        self._tell = tell
        self._pids: dict[int, int] = {}
        self._looking: tuple[str, float] | None = None
        self._changed = threading.Event()
        self.broken = ""
        self.is_over = False

    def ask(
        self, look: str, function: Callable[[], Any], *, seconds: float, needs_all: bool = False
    ) -> list[Answer] | None:
        """Take a look on every rank; return the answers by rank, the same on all of them; None if it is not tried.

        Args:
            look: its name, used once.
            function: takes it; what it returns is something that JSON holds. Its errors are answers.
            seconds: the longest that it may take.
            needs_all: ranks wait for each other in it: if it fails on one, the groups are out of step.
        """
        if self.is_over or (needs_all and self.broken):
            return None
        self.tell(look)
        mine = self._attempt(look, function, seconds)
        self._store.set(f"{look}/{self._launch.rank}", json.dumps(mine.__dict__))
        if self._launch.rank == 0:
            answers = self._gathered(self._store, look, seconds + _GRACE_SECONDS)
            self._store.set(f"{look}/all", json.dumps([answer.__dict__ for answer in answers]))
        else:
            answers = self._heard(look, seconds + 2 * _GRACE_SECONDS)
        failed = sorted((answer.seconds, rank) for rank, answer in enumerate(answers) if answer.error)
        self.is_over = any(answer.is_gone for answer in answers)
        if failed and needs_all:
            self.broken = f"{look} failed on rank {failed[0][1]}"
        return answers

    def tell(self, what: str) -> None:
        """Tell the user, on rank 0, what is looked at now."""
        if self._launch.rank == 0:
            self._tell(what)

    def know(self, pids: dict[int, int]) -> None:
        """Say which ranks are processes of this host, so that one that has died is not waited for."""
        self._pids = dict(pids)

    def __enter__(self) -> Together:
        self._ours, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)
        self._before = signal.signal(signal.SIGTERM, lambda *_: None)
        self._wake_before = signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="tpengine-doctor", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._changed.set()
        signal.set_wakeup_fd(self._wake_before)
        signal.signal(signal.SIGTERM, self._before)

    def _attempt(self, look: str, function: Callable[[], Any], seconds: float) -> Answer:
        begin = time.monotonic()
        try:
            with self._bounded(look, seconds):
                return Answer(function())
        except Exception as error:
            text = one_line(f"{type(error).__name__}: {error}")
            return Answer(error=text, seconds=time.monotonic() - begin)

    @contextlib.contextmanager
    def _bounded(self, look: str, seconds: float) -> Iterator[None]:
        self._looking = look, time.monotonic() + seconds
        try:
            yield
        finally:
            self._looking = None

    def _gathered(self, store: Any, look: str, seconds: float) -> list[Answer]:
        """Wait for every rank's answer, for one that has died, or until the time is up."""
        answers: dict[int, Answer] = {}
        end = time.monotonic() + seconds
        missing = set(range(self._launch.world_size))
        while missing:
            for rank in sorted(missing):
                # Before the look into the store: what a rank has said stands there when it dies.
                has_died = rank in self._pids and not lives(self._pids[rank])
                if store.check([f"{look}/{rank}"]):
                    answers[rank] = Answer(**json.loads(store.get(f"{look}/{rank}")))
                elif has_died:
                    answers[rank] = Answer(error="the process died", is_gone=True)
                elif time.monotonic() > end:
                    answers[rank] = Answer(error=f"no answer in {seconds:.0f} s", is_gone=True)
            missing -= answers.keys()
            if missing:
                time.sleep(_POLL_SECONDS)
        return [answers[rank] for rank in range(self._launch.world_size)]

    def _heard(self, look: str, seconds: float) -> list[Answer]:
        """Wait for what rank 0 has gathered; leave if it is gone."""
        end = time.monotonic() + seconds
        try:
            while not self._store.check([f"{look}/all"]):
                if time.monotonic() > end or (0 in self._pids and not lives(self._pids[0])):
                    raise RuntimeError("rank 0 does not answer")
                time.sleep(_POLL_SECONDS)
            return [Answer(**answer) for answer in json.loads(self._store.get(f"{look}/all"))]
        except RuntimeError:  # the store goes with rank 0
            say(f"rank {self._launch.rank} ends: rank 0 is gone: {look}")
            os._exit(RANK_FAILED)

    def _watch(self) -> None:
        """Leave when a look takes too long, or when this process is told to end; the thread's work."""
        while not self._changed.is_set():
            told, _, _ = select.select([self._ours], [], [], _POLL_SECONDS * 10)
            looking = self._looking
            if told and signal.SIGTERM in os.read(self._ours, 64):
                self._end(looking[0] if looking else "between looks", "told to end")
            if looking is not None and time.monotonic() > looking[1]:
                self._end(looking[0], "did not end in its time")

    def _end(self, look: str, why: str) -> None:
        """Say what this rank hangs in, and end it; a look into the store has no part in it that could hang."""
        rank = self._launch.rank
        gone = Answer(error=why, is_gone=True)
        with contextlib.suppress(Exception):
            store = self._another()
            store.set(f"{look}/{rank}", json.dumps(gone.__dict__))
            if rank == 0:
                answers = self._gathered(store, look, _GRACE_SECONDS)
                said = [f"rank {number}: {answer.error}" for number, answer in enumerate(answers) if answer.error]
                self._leave(f"{look}: {'; '.join(said)}")
        if rank != 0:
            say(f"rank {rank} ends: {look}: {why}")
            time.sleep(_LEAVING_SECONDS)
        os._exit(RANK_FAILED)
