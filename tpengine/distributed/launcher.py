"""The ranks of a training run, started on this host by one command: `tpengine train --nproc 4`. No torch.

A rank is a process that runs the training program as it does under torchrun or srun: it finds its place in the
environment, meets the others, and answers signals itself (observe/watch.py). This process computes nothing. It passes
signals on, ends ranks that others have left behind, and leaves with the code that the ranks agree on.

What is deliberately elsewhere: ranks that hold an object whose methods their parent calls, local_ranks.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from tpengine.distributed.launch import STARTED, Launch
from tpengine.last_words import RANK_FAILED, USER_ERROR, interrupt_in_one_line, say

# More processes of one host are torchrun's.
_MOST_RANKS = 256
# Of the text of --nproc: digits of a number, and characters that a message shows.
_MOST_DIGITS, _MOST_SHOWN = 9, 60
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_POLL_SECONDS = 0.05
# When a rank has failed the others find out by themselves, and report whom they waited for. Then they are told to end,
# and at last they are killed, both as by torchrun.
_REPORT_SECONDS, _END_SECONDS = 5.0, 30.0
# What a rank runs; the modules that this process found, the rank finds too.
_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from {module} import {name}; {name}()"
# What --nproc is called elsewhere.
_ALSO = ("--nprocs", "--nproc-per-node", "--nproc_per_node")


def taken_nproc(arguments: Sequence[str]) -> tuple[int | None, list[str]]:
    """Split off --nproc: (the number of processes to start, or None; the other arguments).

    Raises:
        ValueError: it is no such number, it is given twice, or spelled as another program spells it.
    """
    number: int | None = None
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in _ALSO:
            given = value or next(rest, "")
            number_of = given if given.isdecimal() and len(given) <= _MOST_DIGITS else "N"
            raise ValueError(f"{name} is torchrun's name for the processes of this host: use --nproc {number_of}")
        if name != "--nproc":
            others.append(argument)
            continue
        text = value if equals else next(rest, "")
        if not (len(text) <= _MOST_DIGITS and text.isascii() and text.isdecimal() and 0 < int(text) <= _MOST_RANKS):
            shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
            raise ValueError(
                f"--nproc must be the number of processes to start on this host, 1 to {_MOST_RANKS}: got "
                f"{shown or 'nothing'}: use --nproc 2, or torchrun"
            )
        if number is not None:
            raise ValueError(f"--nproc is given twice, {number} and {text}: leave one out")
        number = int(text)
    return number, others


def is_started(launch: Launch, environ: Mapping[str, str]) -> bool:
    """Whether torchrun, srun or this file has started this process as one of several, or as a rank."""
    return launch.world_size > 1 or "TORCHELASTIC_RUN_ID" in environ or "RANK" in environ


def run_ranks_here(num_ranks: int, program: str, arguments: Sequence[str]) -> int:
    """Run a program as the ranks of one run; return the exit code of the whole.

    Args:
        num_ranks: processes to start.
        program: "package.module:name", a function that begins with `begin_rank`.
        arguments: of the program.

    Returns:
        0 if all have ended with 0. If a rank has died or failed: 70; it was a mistake of the user's: 2. After a signal
        that was passed on: 128 + its number.
    """
    ranks = _Ranks(num_ranks)
    with _passing_on(ranks.pass_on):
        with _blocked():
            for rank in range(num_ranks):
                ranks.start(rank, program, arguments)
        ranks.wait()
    return ranks.code()


def begin_rank() -> None:
    """Hear signals from now on; what a rank does first. One that came before counts now."""
    interrupt_in_one_line()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)


class _Ranks:
    """The processes, and what is known of their ends."""

    def __init__(self, num_ranks: int) -> None:
        place = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), STARTED: str(os.getpid())}
        self._environment = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        self._processes: list[subprocess.Popen[bytes]] = []
        # Signals that a rank may have ended by, without having failed.
        self._sent: set[int] = set()
        self._asked: set[int] = set()

    def start(self, rank: int, program: str, arguments: Sequence[str]) -> None:
        """Start the next rank."""
        module, _, name = program.partition(":")
        command = [sys.executable, "-c", _PROGRAM.format(module=module, name=name), json.dumps(sys.path), *arguments]
        environment = {**self._environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        self._processes.append(subprocess.Popen(command, env=environment))

    def pass_on(self, number: int) -> None:
        """Send a signal to every rank that is left."""
        self._asked.add(number)
        self._send(number)

    def _send(self, number: int) -> None:
        self._sent.add(number)
        for process in self._processes:
            process.send_signal(number)  # does nothing if it has ended

    def wait(self) -> None:
        """Wait until all have ended; those that a failed rank leaves behind are ended."""
        failed_at: float | None = None
        said: set[int] = set()
        while any([process.poll() is None for process in self._processes]):
            for rank, process in enumerate(self._processes):
                if process.returncode and rank not in said:
                    said.add(rank)
                    self._say_how(rank, process.returncode)
                    failed_at = failed_at or (time.monotonic() if self._has_failed(process.returncode) else None)
            waited = 0.0 if failed_at is None else time.monotonic() - failed_at
            if waited > _REPORT_SECONDS + _END_SECONDS:
                self._send(signal.SIGKILL)
            elif waited > _REPORT_SECONDS and signal.SIGTERM not in self._sent:
                self._send(signal.SIGTERM)
            time.sleep(_POLL_SECONDS)

    def _say_how(self, rank: int, code: int) -> None:
        """Say that a rank has died: it could not say so itself."""
        if code < 0 and -code not in self._sent:
            say(f"rank {rank} was ended by {_name_of(-code)}: the other ranks end too")

    def _has_failed(self, code: int) -> bool:
        return self._own(code) not in {0, *(128 + number for number in self._asked)}

    def _own(self, code: int) -> int:
        """Return a rank's exit code; that of one which died of a signal that nobody sent is that of a failed rank."""
        if code >= 0:
            return code
        return 128 - code if -code in self._sent else RANK_FAILED

    def code(self) -> int:
        """Return the exit code of the whole."""
        codes = [self._own(process.returncode) for process in self._processes]
        for worst in (RANK_FAILED, USER_ERROR):
            if worst in codes:
                return worst
        expected = {0, *(128 + number for number in self._sent)}
        return next((code for code in codes if code not in expected), max(codes))


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """Have processes that are started inside hear no signal before `begin_rank`: Python would print a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _passing_on(pass_on: Callable[[int], None]) -> Iterator[None]:
    """Give signals to the ranks; those that this process ignores, it goes on ignoring."""

    def handle(number: int, _: FrameType | None) -> None:
        pass_on(number)

    before = {
        number: signal.signal(number, handle) for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    """Return a port at which nobody listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port
