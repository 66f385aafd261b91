"""Find out which other ranks are still alive, as far as this host can tell."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from tpkernels.symmetric.processes import host_identity, lives

from tpengine.distributed.process import link_device


class Peers:
    """The processes of all ranks; the constructor is collective.

    Args:
        device: where this rank computes.

    Attributes:
        local: process ids of the ranks on this host, by rank.
    """

    def __init__(self, device: torch.device) -> None:
        host = host_identity()
        mine = torch.tensor([host, os.getpid()], dtype=torch.int64, device=link_device(device))
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        # Process ids of other hosts mean nothing here.
        self.local = {rank: int(place[1]) for rank, place in enumerate(everyone) if int(place[0]) == host}

    def gone(self, ranks: Sequence[int]) -> list[int]:
        """Return those of `ranks` whose process on this host has ended; never a rank of another host."""
        return [rank for rank in ranks if rank in self.local and not lives(self.local[rank])]
