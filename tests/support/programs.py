"""Programs as a user starts them, forked from a process that has loaded torch (ranks/preloaded.py).

What is left out is a start's own: what is imported in which order, and how an interrupt meanwhile ends; and an end's:
modules are not torn down.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from support.ranks.hosts import Host
from support.ranks.preloaded import Program, preloaded
from support.ranks.progress import LOOK_SECONDS, Progress, kill_family
from support.ranks.rank_pool import environment_of_ranks
from tpengine.distributed.launch import GLOO_INTERFACE

OF_LAUNCHERS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Variables that a launcher sets for its ranks."""


class Running:
    """A program that has been started; who lets go of it, as a test that fails does, ends it.

    Args:
        output: where it writes its standard output, a pipe for instance; by default where `said` reads it.
        host: where it runs; by default here.

    Attributes:
        pid: its process.
        returncode: None until `poll` has found it ended.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        cwd: Path | None = None,
        output: Path | None = None,
        host: Host | None = None,
        **variables: str,
    ) -> None:
        namespaces = () if host is None else host.namespaces
        # What a rank of this process has chosen for this host is no interface of another.
        left_out = (*OF_LAUNCHERS, GLOO_INTERFACE) if namespaces else OF_LAUNCHERS
        inherited = {key: value for key, value in os.environ.items() if key not in left_out}
        environment = {**inherited, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
        self._directory = tempfile.TemporaryDirectory(prefix="program-")
        files = [Path(self._directory.name, name) for name in ("output", "errors")]
        for file in files:
            file.touch()
        self._output, self._errors = files
        to = str(output or self._output), str(self._errors)
        program = Program(str(cwd or os.getcwd()), environment, module, arguments, *to, namespaces=namespaces)
        rank = int(variables.get("RANK") or variables.get("SLURM_PROCID") or 0)
        _, self._connection = preloaded(environment_of_ranks(), rank).fork(program)
        self.args = [module, *arguments]
        self.pid: int = self._connection.recv()
        self.returncode: int | None = None
        weakref.finalize(self, _end, self.pid, self._connection)

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        if self.returncode is None and self._connection.poll():
            self.returncode = self._connection.recv()
        return self.returncode

    def said(self) -> str:
        """What it has written to its standard output so far."""
        return self._output.read_text(errors="replace")

    def errors(self) -> str:
        """What it has written to its standard error so far."""
        return self._errors.read_text(errors="replace")

    def send_signal(self, number: int) -> None:
        """Send a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait_until(self, is_so: Callable[[Running], bool], what: str) -> None:
        """Wait until it is so, for as long as it works.

        Raises:
            AssertionError: it has ended, or hangs, and it is not so.
        """
        progress = Progress([self.pid])
        while not is_so(self):
            has_ended = self.poll() is not None
            if has_ended and is_so(self):
                return
            progress.look()
            assert not has_ended and not progress.is_over(), f"{what}: {self.returncode}, {progress}: {self.errors()}"
            time.sleep(0.05)


def _end(pid: int, connection: Connection) -> None:
    """Kill a program of which its guardian has not said that it has ended."""
    if not connection.poll():
        kill_family(pid)


def finish_all(*running: Running) -> list[subprocess.CompletedProcess[str]]:
    """Wait for programs, which may wait for each other, for as long as one of them works.

    Raises:
        AssertionError: none does.
    """
    progress = Progress([one.pid for one in running])
    next_look = 0.0
    while any(one.poll() is None for one in running):
        if time.monotonic() >= next_look:
            progress.look()
            next_look = time.monotonic() + LOOK_SECONDS
        if progress.is_over():
            for one in running:
                kill_family(one.pid)
            raise AssertionError(f"{running[0].args} hangs: {progress}: {[one.errors() for one in running]}")
        time.sleep(0.01)
    return [subprocess.CompletedProcess(one.args, one.poll() or 0, one.said(), one.errors()) for one in running]


def run_module(
    module: str, *arguments: str, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -m module arguments`."""
    return finish_all(Running(module, *arguments, cwd=cwd, output=None, host=None, **variables))[0]


def start_ranks(
    num_ranks: int, module: str, *arguments: str, cwd: Path | None = None, **variables: str
) -> list[Running]:
    """Start the ranks of one run, each by itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    everywhere = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    everywhere |= dict(environment_of_ranks(), LOCAL_WORLD_SIZE=str(num_ranks), **variables)
    # What they are forked from is there before the first of them waits for the others.
    for rank in range(num_ranks):
        preloaded(environment_of_ranks(), rank)
    return [
        Running(module, *arguments, cwd=cwd, output=None, host=None, **everywhere, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(num_ranks)
    ]


def run_ranks(
    num_ranks: int, module: str, *arguments: str, cwd: Path | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """Run a module on ranks that are each started by itself."""
    return finish_all(*start_ranks(num_ranks, module, *arguments, cwd=cwd))
