"""Ranks on this host, started by one command: spawned processes, one thread each, joined by gloo over a file store.

A rank holds one object, and the parent calls its methods on all ranks over pipes. Between calls a rank blocks in
reading its pipe and uses no core. So several sets of ranks can take turns on the same cores, with separate memory.

This is the parent's side and imports no torch: the object of a rank is named as text, and only the rank imports it, as
it imports its own side, rank_process.py.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from tpengine.distributed.launch import loopback_variables, passive_waiting
from tpengine.terminal import terminal_safe

THREADS_PER_RANK = 1

# After a rank has failed, wait this long for the reports of others: most fail as a consequence, and say less.
_GRACE_SECONDS = 1.0


class RanksFailed(RuntimeError):
    """A rank raised, died or did not answer in time; the message has its traceback."""


class Ranks:
    """`world` processes that are the ranks of one gloo group, which listens on loopback only.

    Args:
        world: number of ranks.
        factory: "package.module:name"; a rank imports it, and calls `name(*args)` to make the object.
        args: picklable.
        seconds: the longest wait for any answer, including the construction.

    Raises:
        RanksFailed: as `call`; in one line if there is no such module or name.

    Use it as a context manager: leaving it, also by an exception or Ctrl-C, ends every rank. If this process is killed,
    a rank ends when it next reads its pipe.
    """

    def __init__(self, world: int, factory: str, *args: Any, seconds: float = 1800.0) -> None:
        self._seconds = seconds
        self._directory = tempfile.TemporaryDirectory(prefix="tpengine-ranks-")
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        store = str(Path(self._directory.name) / "store")
        context = multiprocessing.get_context("spawn")
        try:
            # Without the last one Python would look for its own modules in the folder where the user is.
            variables = {"OMP_NUM_THREADS": str(THREADS_PER_RANK), "PYTHONSAFEPATH": "1"}
            variables |= loopback_variables(os.environ) | passive_waiting(os.environ)
            with _environment(**variables):
                for rank in range(world):
                    ours, theirs = context.Pipe()
                    work = (theirs, rank, world, store, THREADS_PER_RANK, factory, args)
                    process = context.Process(target=_run_rank, args=work, daemon=True)
                    process.start()
                    theirs.close()
                    self._processes.append(process)
                    self._connections.append(ours)
            self._collect()
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the object on every rank at the same time; return the answers by rank.

        Raises:
            RanksFailed: with the traceback of the first rank that failed; all ranks have been ended.
        """
        for connection in self._connections:
            # A rank that has died shows as a closed pipe when its answer is read.
            with contextlib.suppress(OSError):
                connection.send((method, args))
        return self._collect()

    def close(self) -> None:
        """End all ranks."""
        for process, connection in zip(self._processes, self._connections, strict=True):
            connection.close()
            process.kill()
            process.join()
        self._processes, self._connections = [], []
        self._directory.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collect(self) -> list[Any]:
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        answers: dict[int, Any] = {}
        failures: dict[str, list[int]] = {}  # ranks by their report: ranks with the same mistake report the same
        deadline = time.monotonic() + self._seconds
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failures = failures or {f"no answer in {self._seconds:g} s": sorted(waiting.values())}
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    done, value = connection.recv()
                except (EOFError, OSError):
                    done, value = False, "the process died"
                if done:
                    answers[rank] = value
                else:
                    failures.setdefault(value, []).append(rank)
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if failures:
            self.close()
            raise RanksFailed("\n".join(f"{_named(ranks)}: {text}" for text, ranks in failures.items()))
        return [answers[rank] for rank in range(len(answers))]


def run_ranks(world: int, function: str, *args: Any) -> Any:
    """Call a function on every rank of a gloo group of its own; return rank 0's answer.

    Args:
        world: number of ranks.
        function: "package.module:name".
        args: picklable; so must be the answers.

    Raises:
        RanksFailed: as Ranks.call.
    """
    with Ranks(world, "tpengine.distributed.rank_process:Function", function) as ranks:
        return ranks.call("run", *args)[0]


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables for the processes started inside."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run_rank(*work: Any) -> None:
    # The terminal sends Ctrl-C to the ranks too; they ignore it, and the parent ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Only here: the file needs torch, and who starts ranks does not.
    from tpengine.distributed.rank_process import serve

    with terminal_safe():
        serve(*work)
