"""Processes of this host: which share it, whether one still lives, what a forked one must not touch. No torch."""

from __future__ import annotations

import hashlib
import os
import socket
import weakref
from pathlib import Path
from typing import Any, NoReturn


def host_identity() -> int:
    """A 56-bit number that is equal for two processes only if their process numbers mean the same.

    It stands for a running kernel and a namespace of process numbers in it: containers may share a host's name, and
    do not see each other's processes.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        name = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        name = socket.gethostname()
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def lives(pid: int) -> bool:
    """Whether the process `pid` of this host still runs; a host without /proc cannot tell, and answers yes."""
    try:
        # The state follows the name, which is in brackets and may hold anything. A zombie waits for its parent only.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return not Path("/proc/self/stat").exists()


class _Closed:
    """In the place of what a forked child inherits and must not use: whatever it is asked for, it raises.

    It keeps what was there: that would otherwise end in the child, where its threads and mappings are not.
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


# Objects by identity, each with its name in messages and its attributes that a forked child must not use.
_OWNERS: weakref.WeakKeyDictionary[Any, tuple[str, tuple[str, ...]]] = weakref.WeakKeyDictionary()


def close_to_children(owner: object, what: str, *attributes: str) -> None:
    """Make attributes of an object, or methods, raise RuntimeError in processes that are forked from this one.

    Memory that ranks share is not mapped there, and the threads of a process group do not run: a use would die of
    SIGSEGV, or wait for ever. A child that only inherits the object is not disturbed.

    Args:
        owner: held weakly.
        what: it is, for the message.
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
