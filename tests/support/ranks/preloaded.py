"""A process that has imported what tests need, and forks: a start costs a tenth of a second instead of four.

It has one thread, since torch computes with one and nothing is computed before a fork, so that forking is safe. It is
`python preloaded.py NUMBER MODULES`, where NUMBER is the file descriptor of a connection over which orders come, each
with the connection that its process is given: a worker to be told what to do, a program's guardian to tell how that
gets on.

There are two of it, for even and for odd ranks, which hash strings differently: an order that is taken from a set of
strings differs between the ranks of a test, as it does between those of users.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle

# What most ranks use; the rest is imported by those that need it. Not every machine has what all of these import.
MODULES = (
    "torch.distributed",
    "torch._dynamo",
    "pytest",
    "hypothesis",
    "tpkernels",
    "tpengine.training.run.loop",
    "tpengine.commands.arguments",
    "tpengine.checkpoint.run.run_directory",
    "tpengine.checkpoint.run.resume",
)


@dataclass(frozen=True)
class Worker:
    """A process that is told what to do.

    Attributes:
        variables: what it adds to its environment; nothing that has been imported looks at them.
    """

    variables: Mapping[str, str]

    def serve(self, connection: Connection) -> None:
        """Do what is asked for through the connection, until that is closed."""
        from support.ranks.rank_pool import work

        os.environ.update(self.variables)
        work(connection)


@dataclass(frozen=True)
class Program:
    """A module that is run as `python -m` does.

    Attributes:
        environment: all its variables.
        output, errors: files to which it writes its standard output and error.
    """

    module: str
    arguments: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    output: str
    errors: str

    def serve(self, connection: Connection) -> None:
        """Run it in a child; tell its process id, and its exit code when it has ended. It ends with the connection."""
        pid = os.fork()
        if not pid:
            connection.close()
            self._become()
            return
        connection.send(pid)
        if connection in wait([connection, os.pidfd_open(pid)]):  # who started it is gone
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            connection.send(code)
        os._exit(0)

    def _become(self) -> None:
        """Run it in this process, to its end; raises what it raises, but SystemExit.

        As in children of multiprocessing, no module is torn down: that would copy all memory, for half a second.
        """
        os.chdir(self.directory)
        os.environ.clear()
        os.environ.update(self.environment)
        for number, path, flags in (
            (0, os.devnull, os.O_RDONLY),
            (1, self.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
            (2, self.errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        ):
            file = os.open(path, flags)
            os.dup2(file, number)
            os.close(file)
        sys.argv = [self.module, *self.arguments]
        code: object = None
        try:
            runpy.run_module(self.module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code or 0))  # type: ignore[call-overload]


class Preloaded:
    """The process, as the session sees it. It ends with the session; one that has died is replaced.

    Args:
        environment: its variables.
        modules: what it imports.
    """

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = MODULES) -> None:
        self._environment, self._modules = dict(environment), modules
        self._start()

    def _start(self) -> None:
        self._orders, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-B", __file__, str(theirs.fileno()), *self._modules]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=self._environment)
        theirs.close()
        # Tensors that a task takes or returns are shared memory, which only processes with this key may ask for.
        self._orders.send_bytes(bytes(multiprocessing.current_process().authkey))

    def fork(self, order: Program | Worker) -> tuple[int, Connection]:
        """A process of its own for an order: its id, and the connection to it."""
        if self._process.poll() is not None:
            self._start()
        ours, theirs = multiprocessing.Pipe()
        self._orders.send(order)
        send_handle(self._orders, theirs.fileno(), self._process.pid)
        theirs.close()
        return self._orders.recv(), ours


def preloaded(environment: tuple[tuple[str, str], ...], rank: int) -> Preloaded:
    """The process of these variables that forks this rank; a session has one for even and one for odd ranks."""
    return _preloaded(environment, rank % 2)


@functools.cache
def _preloaded(environment: tuple[tuple[str, str], ...], turn: int) -> Preloaded:
    paths = os.pathsep.join(path for path in sys.path if path)
    return Preloaded({**os.environ, **dict(environment), "PYTHONPATH": paths, "PYTHONHASHSEED": str(turn + 1)})


def main(number: int, modules: Sequence[str]) -> None:
    """Fork by order, until the session is over. Children leave this function to end as processes do."""
    for name in modules:
        # A rank that needs what is not installed imports it itself, and says so.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    importlib.import_module("support.ranks.rank_pool")
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    # What is there now stays: a child's collector need not look at it, and copies no page for that.
    gc.freeze()
    orders = Connection(number)
    multiprocessing.current_process().authkey = orders.recv_bytes()
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return
        connection = Connection(recv_handle(orders))
        pid = os.fork()
        if not pid:
            orders.close()
            order.serve(connection)
            return
        # Whoever else held it would keep it open when the process has died.
        connection.close()
        orders.send(pid)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
