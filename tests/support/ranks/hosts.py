"""Two hosts on one machine: namespaces of network, processes, names and mounts, with a cable between them.

A host is a process, its number 1, and what runs beside that: it has interfaces, process numbers and a name of its own,
and no memory of the other's can be opened. Both see the same files, as nodes with a shared directory do. Its name leads
nowhere, as those of many containers, unless the test gives it a list of names.

Nothing of it has a name outside: interfaces go with their namespaces, these with their processes, and these with the
test's process, however it ends. Where the kernel or a sandbox does not allow namespaces `two_hosts` says why, and gives
two hosts that are this one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# In this order: a namespace of users gives the right to enter the others, and that of mounts is left last.
_KINDS = ("user", "ipc", "uts", "net", "pid", "mnt")
_NEW = ("--net", "--uts", "--ipc", "--mount", "--fork", "--kill-child")
# Linux: a process ends with the one that has started it.
_PR_SET_PDEATHSIG = 1
_OWN_PROCESSES = ("--pid", "--mount-proc")


class NotAllowed(Exception):
    """This machine gives no namespaces; the message says what it refused."""


@dataclass(frozen=True)
class Host:
    """One of two hosts.

    Attributes:
        name: what `hostname` says there.
        address: at which the other reaches it.
        init: its first process, with which all others of it die; 0 if the host is this one.
    """

    name: str
    address: str
    init: int = 0

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The files of its namespaces that are not this process's, in the order in which they are entered."""
        if not self.init:
            return ()
        files = [f"/proc/{self.init}/ns/{kind}" for kind in _KINDS]
        return tuple(file for file in files if os.readlink(file) != os.readlink(f"/proc/self/ns/{Path(file).name}"))

    def command(self, *command: str, directory: Path | None = None, kinds: tuple[str, ...] = _KINDS) -> list[str]:
        """A command line that runs a command there, or in some of its namespaces only."""
        if not self.init:
            return list(command)
        names = [Path(file).name for file in self.namespaces]
        flags = [f"--{name.replace('mnt', 'mount')}" for name in names if name in kinds]
        keep = ["--preserve-credentials"] if "--user" in flags else []
        return ["nsenter", "--target", str(self.init), *flags, *keep, f"--wd={directory or os.getcwd()}", *command]

    def run(self, *command: str) -> None:
        """Run a command there.

        Raises:
            NotAllowed: it fails.
        """
        _run(self.command(*command))

    def kill(self) -> None:
        """End it: the kernel kills all of its processes at once, and their connections are closed."""
        assert self.init, "this host is not to be killed"
        os.kill(self.init, signal.SIGKILL)

    def cut(self) -> None:
        """Pull its cable: nothing comes through any more, and nobody is told."""
        self.run("ip", "link", "set", "eth0", "down")

    def know(self, names: Path) -> None:
        """Have it look up names in a file, as in /etc/hosts."""
        self.run("mount", "--bind", str(names), "/etc/hosts")


@dataclass(frozen=True)
class TwoHosts:
    """Two hosts.

    Attributes:
        hosts: the two.
        refused: why they are no namespaces, and both are this host; empty if they are.
    """

    hosts: tuple[Host, Host]
    refused: str = ""

    @property
    def unproven(self) -> str:
        """What a test does not show on this machine; empty where there are namespaces."""
        return f"two hosts, one of which dies, are unproven here: {self.refused}" if self.refused else ""


@contextlib.contextmanager
def two_hosts(*, see_processes: bool = False) -> Iterator[TwoHosts]:
    """Two hosts, host-a at 10.77.0.1 and host-b at 10.77.0.2, also fd00:77::1 and ::2; both end with the context.

    Args:
        see_processes: whether they see each other's processes, as containers with `--pid host` do. Such a host is not
            killed as a whole.
    """
    with contextlib.ExitStack() as ending:
        try:
            yield TwoHosts(_made(ending, _NEW if see_processes else (*_NEW, *_OWN_PROCESSES)))
        except NotAllowed as error:
            ending.close()
            yield TwoHosts((Host("localhost", "127.0.0.1"), Host("localhost", "127.0.0.1")), str(error))


def _made(ending: contextlib.ExitStack, flags: tuple[str, ...]) -> tuple[Host, Host]:
    """Make two hosts with what `unshare` takes.

    Raises:
        NotAllowed: this machine does not.
    """
    before: list[str] = []
    if os.geteuid():
        # A user who is root in a namespace of users of his own; both hosts are within it.
        user = _first_process(["unshare", "--user", "--map-root-user", "--fork", "--kill-child"], "", ending)
        before = ["nsenter", "--target", str(user), "--user", "--preserve-credentials"]
    first, second = (
        Host(
            f"host-{letter}",
            f"10.77.0.{number}",
            _first_process([*before, "unshare", *flags], f"host-{letter}", ending),
        )
        for number, letter in enumerate("ab", 1)
    )
    # The second one's process number is one of this host, not of the first's.
    cable = ["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second.init)]
    _run(first.command(*cable, kinds=("user", "net")))
    for number, host in enumerate((first, second), 1):
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "address", "add", f"fd00:77::{number}/64", "dev", "eth0", "nodad")
        host.run("ip", "link", "set", "eth0", "up")
    return first, second


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise NotAllowed(f"{error}") from None
    if done.returncode:
        raise NotAllowed(f"{' '.join(command)}: {done.stderr.strip()}")


def _first_process(unshare: list[str], name: str, ending: contextlib.ExitStack) -> int:
    """Start the process that a namespace lives by; return its number here. It ends when its input does."""
    own = f"hostname {name} && ip link set lo up && " if name else ""
    try:
        process = subprocess.Popen(
            [*unshare, "sh", "-c", f"{own}echo ready && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        raise NotAllowed(str(error)) from None
    ending.callback(_end, process)
    assert process.stdout is not None and process.stderr is not None
    if process.stdout.readline() != b"ready\n":
        process.kill()
        raise NotAllowed(f"{' '.join(unshare)}: {process.stderr.read().decode().strip()}")
    pid = process.pid
    # nsenter becomes unshare, whose child is the first process.
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def enter(namespaces: tuple[str, ...]) -> None:
    """Have this process, which has one thread, be one of a host; the process that called waits for it, and ends alike.

    Process numbers of a namespace begin with a child.
    """
    library = ctypes.CDLL(None, use_errno=True)
    opened = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in namespaces]
    for descriptor, path in zip(opened, namespaces, strict=True):
        if library.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"setns {path}")
    child = os.fork()
    if not child:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
