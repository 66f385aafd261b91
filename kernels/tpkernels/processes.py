"""Processes of this host: which of them share it, and whether one still lives. No torch."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path


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
