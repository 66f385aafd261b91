"""Processes of this host: which ranks share it, whether one is alive, what a forked one must not use. No torch."""

from __future__ import annotations

import hashlib
import os
import socket
import weakref
from pathlib import Path
from typing import Any, NoReturn


def host_identity() -> int:
    """Return a 56-bit number that is equal for two processes only if their process ids mean the same.

    It identifies a running kernel and a namespace of process ids in it: containers may have the same host name, and do
    not see each other's processes.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        name = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        name = socket.gethostname()
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def lives(pid: int) -> bool:
    """Return whether the process `pid` of this host is running; without /proc that is unknown, and it returns True."""
    try:
        # The state comes after the name, which is in brackets and may contain anything. A zombie has ended.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return not Path("/proc/self/stat").exists()


class _Closed:
    """Replaces what a forked child inherits and must not use: every use raises.

    It keeps the original object alive, because its destructor would run in the child, which lacks its threads and
    mappings.
    """

    def __init__(self, what: str, kept: object) -> None:
        self.__dict__.update(_what=what, _kept=kept)

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            f"{self._what} belongs to the process that made it: got a use in process {os.getpid()}, which was forked: "
            "use it in the parent, or start the child by multiprocessing's spawn"
        )

    def __getattr__(self, name: str) -> Any:
        self._refuse()

    def __getitem__(self, index: Any) -> Any:
        self._refuse()

    def __call__(self, *_: Any, **__: Any) -> Any:
        self._refuse()


# Objects by identity, each with its name for messages and the attributes that a forked child must not use.
_OWNERS: weakref.WeakKeyDictionary[Any, tuple[str, tuple[str, ...]]] = weakref.WeakKeyDictionary()


def close_to_children(owner: object, what: str, *attributes: str) -> None:
    """Make attributes of an object, or methods, raise RuntimeError in processes that are forked from this one.

    Memory that ranks share is not mapped in a forked process, and the threads of a process group do not run there: a
    use would die of SIGSEGV, or wait for ever. A child that only inherits the object is not affected.

    Args:
        owner: the object, held weakly.
        what: the object's name, for the message.
        attributes: their names.

    Cost: nothing until a process is forked by Python (os.fork, multiprocessing).
    """
    _OWNERS[owner] = what, attributes


def _close_in_child() -> None:
    for owner, (what, attributes) in list(_OWNERS.items()):
        for name in attributes:
            owner.__dict__[name] = _Closed(what, getattr(owner, name))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
