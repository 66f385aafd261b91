"""A pool of worker processes that lives as long as the test session and runs functions as ranks of a process group.

Starting a process that imports torch takes longer than most tests, so workers are kept, and are forked from one process
that has imported it (preloaded.py). A function is named by its file and name, so that any test module can hold the
programs its ranks run. Each task makes a process group of its
own over a file store and destroys it; a task that hangs, or whose group cannot be made, costs the pool its workers,
never the session. A task may take as long as a rank works on it (progress.py).
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import inspect
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from support.kernels.interpreter import patch_language_once
from support.ranks.preloaded import Worker, preloaded
from support.ranks.progress import LOOK_SECONDS, Progress
from tpengine.distributed.launch import loopback_variables

# After a rank's failure: the others may wait for it for ever.
QUIET_SECONDS_AFTER_A_FAILURE = 3.0
CPU_SECONDS_AFTER_A_FAILURE = 120.0
# As the session began: a test that trains in this process leaves variables behind, for which all would start again.
_LOOPBACK = loopback_variables(os.environ)
_DONE, _FAILED, _UNUSABLE = "done", "failed", "unusable"


class RankError(AssertionError):
    """A rank's function raised, died or hangs; the message holds the traceback."""


def _load(path: str, name: str) -> Callable[..., Any]:
    module_name = "rank_program_" + path.replace("/", "_").removesuffix(".py")
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None, path
        sys.modules[module_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module_name])
    return getattr(sys.modules[module_name], name)


def work(connection: Connection) -> None:
    """Be a worker: make what is asked for through the connection, until that is closed."""
    import torch.distributed as dist

    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        patch_language_once()
    while True:
        try:
            path, name, rank, world, store, args = connection.recv()
        except EOFError:  # the session is over
            return
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        except BaseException:
            # torch has counted a group that there is not: the next would have another name here than on other ranks, so
            # that all would wait.
            connection.send((_UNUSABLE, traceback.format_exc()))
            return
        try:
            dist.barrier()  # a function that fails at once must not close connections that others still make
            connection.send((_DONE, _load(path, name)(*args)))
        except BaseException:
            connection.send((_FAILED, traceback.format_exc()))
        finally:
            dist.destroy_process_group()
            gc.collect()  # trainers hold cycles, and would wait for the next collection with all their memory
            # What is left are modules and caches. After torch.compile they are so many that to look at them again would
            # take longer than most tasks.
            gc.freeze()


def environment_of_ranks(**others: str) -> tuple[tuple[str, str], ...]:
    """The variables that ranks on this host need, and others."""
    return tuple(sorted({"OMP_NUM_THREADS": "1", **_LOOPBACK, **others}.items()))


class RankPool:
    """Runs functions on `world` ranks, each in a process of its own.

    Args:
        environment: variables that the processes start with, besides this one's; for each set of them torch is
            imported anew.
        late: variables that are set when everything has been imported.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, late: Mapping[str, str] | None = None) -> None:
        self._environment = environment_of_ranks(**(environment or {}))
        self._order = Worker(dict(late or {}))
        self._workers: list[tuple[int, Connection]] = []
        self._stores = tempfile.TemporaryDirectory(prefix="ranks-")
        self._num_tasks = 0

    def run(self, function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        """Call `function(*args)` on every rank of a fresh gloo group; return the results by rank.

        Raises:
            RankError: a rank raised or died, or none worked any more.
        """
        self._grow(world)
        self._num_tasks += 1
        store = str(Path(self._stores.name) / f"store-{self._num_tasks}")
        path = inspect.getsourcefile(function)
        for rank in range(world):
            self._workers[rank][1].send((path, function.__name__, rank, world, store, args))
        results, errors = self._collect(world)
        if errors:
            raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())))
        return [results[rank] for rank in range(world)]

    def _collect(self, world: int) -> tuple[dict[int, Any], dict[int, str]]:
        waiting = {self._workers[rank][1]: rank for rank in range(world)}
        # Who has answered may have to work for the others still: a thread that stands for a copy engine.
        progress = Progress([pid for pid, _ in self._workers[:world]])
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        are_usable = True
        quiet_seconds: float | None = None
        cpu_seconds = float("inf")
        while waiting:
            ready = wait(list(waiting), timeout=LOOK_SECONDS)
            if not ready:
                progress.look()
                if progress.is_over(quiet_seconds) or progress.cpu_seconds > cpu_seconds:
                    for rank in waiting.values():
                        errors.setdefault(rank, f"no answer: {progress}")
                    break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    outcome, value = connection.recv()
                except (EOFError, OSError):
                    outcome, value = _UNUSABLE, "the process died"
                are_usable &= outcome != _UNUSABLE
                if outcome == _DONE:
                    results[rank] = value
                else:
                    errors[rank] = value
                    quiet_seconds = QUIET_SECONDS_AFTER_A_FAILURE
                    cpu_seconds = min(cpu_seconds, progress.cpu_seconds + CPU_SECONDS_AFTER_A_FAILURE)
        if waiting or not are_usable:
            self.close()
        return results, errors

    def _grow(self, world: int) -> None:
        while len(self._workers) < world:
            self._workers.append(preloaded(self._environment, rank=len(self._workers)).fork(self._order))

    def close(self) -> None:
        """End all workers; the next `run` starts new ones."""
        for pid, connection in self._workers:
            connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._workers.clear()
