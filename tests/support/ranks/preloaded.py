"""Processes that have imported what tests need, and fork: a start costs a tenth of a second instead of eight.

A session, with all of its workers, has two roots, for even and for odd ranks, which hash strings differently: an order
that is taken from a set of strings differs between the ranks of a test, as it does between those of users. A root has
imported what reads no variable. For each set of variables it forks a template, which imports the rest, once for all
workers; and for each worker that asks for it, a template forks a server, whose descendants are that worker's alone.

All have one thread, since torch computes with one and nothing is computed before a fork, so that forking is safe. A
root is `python preloaded.py LISTENER ALIVE`: file descriptors of a socket where workers come, and of a pipe that ends
with the session. Orders come to a server over the connection that a worker made, each with the connection that its
process is given: a rank to be told what to do, a program's guardian to tell how that gets on.
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
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from support.ranks.hosts import enter

Variables = tuple[tuple[str, str], ...]

# What imports no triton: that reads TRITON_INTERPRET as it is imported.
OF_ROOTS = (
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.fx.experimental.symbolic_shapes",
    "pytest",
    "hypothesis",
)
# What most ranks use; the rest is imported by those that need it. Not every machine has what all of these import.
MODULES = (
    "torch.distributed",
    "torch._dynamo",
    "tpkernels",
    "tpengine.runs.loop",
    "tpengine.data",
    "tpengine.hugging_face.beginning",
    "tpengine.planner.draw.learning_rate",
    "tpengine.planner.profiles.recorded",
    "tpengine.commands.arguments",
    "tpengine.checkpoint.run_directory",
    "tpengine.checkpoint.resume",
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
class Guarded:
    """What a child of its own does, whose guardian tells its process id, and its exit code when it has ended.

    Attributes:
        directory: where it runs.
        environment: all its variables.
    """

    directory: str
    environment: Mapping[str, str]

    def serve(self, connection: Connection) -> None:
        """Do it in a child. That ends with the connection."""
        pid = os.fork()
        if not pid:
            connection.close()
            os.chdir(self.directory)
            os.environ.clear()
            os.environ.update(self.environment)
            self.become()
            return
        connection.send(pid)
        if connection in wait([connection, os.pidfd_open(pid)]):  # who started it is gone
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):
            connection.send(code)
        os._exit(0)

    def become(self) -> None:
        """Do it in this process."""
        raise NotImplementedError


@dataclass(frozen=True)
class Call(Guarded):
    """A call of a function, as `multiprocessing` makes it in a process.

    Attributes:
        path: where it looks for modules.
    """

    path: Sequence[str]
    function: Callable[..., object]
    args: tuple[Any, ...]

    def become(self) -> None:
        sys.path[:] = self.path
        self.function(*self.args)


@dataclass(frozen=True)
class Program(Guarded):
    """A module that is run as `python -m` does.

    Attributes:
        output, errors: files to which it writes its standard output and error.
        namespaces: of a host on which it runs (hosts.py); none for this one.
    """

    module: str
    arguments: tuple[str, ...]
    output: str
    errors: str
    namespaces: tuple[str, ...] = field(default=(), kw_only=True)

    def become(self) -> None:
        """Run it to its end; raises what it raises, but SystemExit.

        As in children of multiprocessing, no module is torn down: that would copy all memory, for half a second.
        """
        if self.namespaces:
            enter(self.namespaces)
            os.chdir(self.directory)
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


class Roots:
    """The two roots of a session. They have imported nothing until somebody asks, and end with this process.

    Attributes:
        paths: their sockets.
        pids: their processes.
    """

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="preloaded-")
        self.paths = [str(Path(self._directory.name, str(turn))) for turn in range(2)]
        theirs, self._alive = os.pipe()
        self._processes = [self._start(turn, path, theirs) for turn, path in enumerate(self.paths)]
        os.close(theirs)
        self.pids = [process.pid for process in self._processes]

    def _start(self, turn: int, path: str, alive: int) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONHASHSEED": str(turn + 1)}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(64)
            descriptors = listener.fileno(), alive
            command = [sys.executable, "-B", __file__, *map(str, descriptors)]
            return subprocess.Popen(command, pass_fds=descriptors, env=environment)


class Preloaded:
    """A server, as a session's worker sees it. It ends with the worker; one that has died is replaced.

    Args:
        path: its root's socket.
        variables: of its template.
        modules: what that imports.

    Attributes:
        pid: its process.
    """

    def __init__(self, path: str, variables: Variables, modules: Sequence[str] = MODULES) -> None:
        self._path, self._template = path, (variables, tuple(modules))
        self._connect()

    def _connect(self) -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self._path)
            self._orders = Connection(client.detach())
        self._orders.send(self._template)
        # Tensors that a task takes or returns are shared memory, which only processes with this key may ask for.
        self._orders.send_bytes(bytes(multiprocessing.current_process().authkey))
        self.pid: int = self._orders.recv()

    def fork(self, order: Worker | Guarded) -> tuple[int, Connection]:
        """A process of its own for an order: its id, and the connection to it."""
        if self._orders.poll():  # nothing comes unasked but its end
            self._connect()
        ours, theirs = multiprocessing.Pipe()
        self._orders.send(order)
        send_handle(self._orders, theirs.fileno(), self.pid)
        theirs.close()
        return self._orders.recv(), ours


# The sockets of the roots of a session with workers: its first process sets it, and the others have it from there.
ROOTS_VARIABLE = "TPENGINE_TEST_ROOTS"
_servers: dict[tuple[Variables, int], Preloaded] = {}


def preloaded(variables: Variables, rank: int) -> Preloaded:
    """The server with these variables that forks this rank; a worker has one for even and one for odd ranks."""
    key = variables, rank % 2
    if key not in _servers:
        _servers[key] = Preloaded(path_of_root(rank), variables)
    return _servers[key]


def path_of_root(rank: int) -> str:
    """The socket of this session's root for even or for odd ranks."""
    given = os.environ.get(ROOTS_VARIABLE)
    return (given.split(os.pathsep) if given else _own_roots().paths)[rank % 2]


@functools.cache
def _own_roots() -> Roots:
    return Roots()


def pids_of_servers() -> list[int]:
    """The servers of this process that are not its descendants."""
    return [server.pid for server in _servers.values()] if ROOTS_VARIABLE in os.environ else []


def _import(modules: Sequence[str]) -> None:
    for name in modules:
        # A rank that needs what is not installed imports it itself, and says so.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    # What is there now stays: a child's collector need not look at it, and copies no page for that.
    gc.freeze()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def be_root(listener: socket.socket, alive: int) -> None:
    """Hand workers to the templates that they ask for, until the session is over."""
    templates: dict[object, tuple[int, Connection]] = {}
    while alive not in wait([listener, alive]):
        if not templates:
            _import(OF_ROOTS)
            assert "triton" not in sys.modules, "it has read this process's variables"
        worker = Connection(listener.accept()[0].detach())
        asked = worker.recv()
        if asked not in templates or templates[asked][1].poll():  # it has died
            ours, theirs = multiprocessing.Pipe()
            pid = os.fork()
            if not pid:
                ours.close()
                listener.close()
                worker.close()
                return be_template(theirs, *asked)
            theirs.close()
            templates[asked] = pid, ours
        pid, template = templates[asked]
        send_handle(template, worker.fileno(), pid)
        worker.close()
        _reap()


def be_template(workers: Connection, variables: Variables, modules: Sequence[str]) -> None:
    """Fork a server for each worker, until the root is gone."""
    os.environ.update(variables)
    _import([*modules, "support.ranks.rank_pool"])
    while True:
        try:
            worker = Connection(recv_handle(workers))
        except EOFError:
            return
        if not os.fork():
            workers.close()
            return be_server(worker)
        worker.close()
        _reap()


def be_server(orders: Connection) -> None:
    """Fork by order, until the worker is gone. Children leave this function to end as processes do."""
    multiprocessing.current_process().authkey = orders.recv_bytes()
    orders.send(os.getpid())
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return _reap()
        connection = Connection(recv_handle(orders))
        pid = os.fork()
        if not pid:
            orders.close()
            order.serve(connection)
            return
        # Whoever else held it would keep it open when the process has died.
        connection.close()
        del order
        orders.send(pid)
        _reap()


if __name__ == "__main__":
    be_root(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
