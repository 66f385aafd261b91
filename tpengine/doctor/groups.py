"""The process groups of an examination: all ranks over gloo, each host's over gloo, and NCCL where GPUs allow it.

What is deliberately elsewhere: a run's groups (distributed/mesh.py). An examination must not fail where a run would, so
it begins with what always works.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tpengine.distributed.launch import Launch, loopback_variables


def join(launch: Launch, store: Any, seconds: float, *, is_one_host: bool) -> int:
    """Make the default group, over gloo; return the sum of all ranks' numbers, each plus 1, as it has them add up.

    Args:
        launch: this rank's place.
        store: where the ranks have met.
        seconds: the longest wait for a rank in a collective.
        is_one_host: all ranks reach each other over loopback.
    """
    if is_one_host:
        os.environ.update(loopback_variables(os.environ))
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("doctor", store),  # type: ignore[attr-defined]
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=datetime.timedelta(seconds=seconds),
    )
    total = torch.tensor([launch.rank + 1])
    dist.all_reduce(total)
    return int(total)


def host_group(hosts: Mapping[int, Sequence[int]], own: int, backend: str = "gloo") -> ProcessGroup:
    """Return the group of this rank's host; collective.

    Args:
        hosts: the ranks of each host, by its number.
        own: this rank's host.
        backend: of the groups.
    """
    made = {number: dist.new_group(list(ranks), backend=backend) for number, ranks in hosts.items()}
    group = made[own]
    assert isinstance(group, ProcessGroup), "this rank is a member"
    return group


def nccl_group(device: torch.device, ranks: Sequence[int] | None = None) -> ProcessGroup:
    """Return a group over NCCL, once it has added integers right; all ranks of the default group call it.

    Args:
        device: this rank's GPU.
        ranks: global ranks, this one among them; None for all.

    Raises:
        ValueError: the sum is wrong.
    """
    group = dist.new_group(None if ranks is None else list(ranks), backend="nccl")
    assert isinstance(group, ProcessGroup), "this rank is a member"
    x = torch.full((1 << 16,), dist.get_rank(group) + 1, dtype=torch.int32, device=device)
    dist.all_reduce(x, group=group)
    world = dist.get_world_size(group)
    if not bool((x == world * (world + 1) // 2).all()):
        raise ValueError(f"NCCL added integers wrong over {world} ranks")
    return group


def blocks(ranks: Sequence[int]) -> list[list[list[int]]]:
    """Return the ranks of a host in equal blocks of 2, 4, 8, ... as long as they divide; the whole at last."""
    found = []
    size = 2
    while size < len(ranks):
        if len(ranks) % size == 0:
            found.append([list(ranks[first : first + size]) for first in range(0, len(ranks), size)])
        size *= 2
    return [*found, [list(ranks)]]
