"""Whether the other ranks still live, as far as this host can tell."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tpengine.distributed import link_device


class Peers:
    """The processes of all ranks; the constructor is collective.

    Args:
        device: where this rank computes.
    """

    def __init__(self, device: torch.device) -> None:
        host = int.from_bytes(hashlib.sha256(_host().encode()).digest()[:7], "big")
        mine = torch.tensor([host, os.getpid()], dtype=torch.int64, device=link_device(device))
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        # Process numbers mean something on this host only.
        self._local = {rank: int(place[1]) for rank, place in enumerate(everyone) if int(place[0]) == host}

    def gone(self, ranks: Sequence[int]) -> list[int]:
        """The ranks of `ranks` whose process on this host has ended; ranks of other hosts are never among them."""
        return [rank for rank in ranks if rank in self._local and not _lives(self._local[rank])]


def _host() -> str:
    """What process numbers are unique in: a running kernel and a namespace of it; containers may share a name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _lives(pid: int) -> bool:
    try:
        # The state follows the name, which is in brackets and may hold anything. A zombie waits for its parent only.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return not Path("/proc/self/stat").exists()
