"""How process groups are made: split off the default group where it is NCCL's, else by new_group.

    split      NCCL with a bound device (process.start): dist.split_group. All ranks take part in every split, members
               or not, in one order; a communicator is there when it returns, and its first call connects nothing.
    new_group  gloo, and NCCL without a bound device: the members of a group alone meet, if all ranks have made equally
               many groups; else all ranks make all groups.

new_group must not be used by a part of the ranks where a device is bound: torch then splits the default group's
communicator underneath, which waits for all ranks (_new_process_group_helper: perform_nocolor_split).

Groups of NCCL are given a limit of processors (nccl_limits.py), and so are never the default group itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _world
from tpkernels.symmetric.memory import device_for_numbers, exchange

# What torch gives a group without a timeout: NCCL's, and gloo's.
NCCL_SECONDS, GLOO_SECONDS = 600.0, 1800.0


def is_nccl() -> bool:
    """Return whether the default group is NCCL's."""
    return dist.get_backend() == "nccl"


def splits_groups() -> bool:
    """Return whether groups are split off the default group; the one place where that is decided."""
    world = dist.group.WORLD
    assert world is not None, "make the default process group first"
    return is_nccl() and world.bound_device_id is not None


def library_timeout(timeout_seconds: float, *, nccl: bool) -> timedelta:
    """Return how long the communication library waits: its own time, or twice the run's limit if that is longer.

    The watch ends a run at its limit, with a report of each rank. The library gives none, and so must come later; a
    receive that is posted early waits longer than any action.

    Args:
        timeout_seconds: train.timeout_seconds; 0 for the library's own.
        nccl: whether it is NCCL.
    """
    return timedelta(seconds=max(NCCL_SECONDS if nccl else GLOO_SECONDS, 2 * timeout_seconds))


def nccl_options(max_processors: int) -> Any:
    """Return the options of a group of NCCL that may take so many processors; 0 for its own choice."""
    options = dist.ProcessGroupNCCL.Options()
    if max_processors:
        options.config.max_ctas = max_processors
    return options


@dataclass
class GroupMaker:
    """Makes this rank's groups, in the same order on all ranks.

    Args:
        timeout_seconds: train.timeout_seconds.
        processors: of groups of NCCL that have a limit, by the group's name.
    """

    timeout_seconds: float = 0.0
    processors: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._splits = splits_groups()
        self._is_counted_alike = self._splits or _has_made_groups_alike()

    def own(self, name: str, groups: Sequence[Sequence[int]]) -> ProcessGroup:
        """Make the group of `groups` that this rank is a member of; collective over all ranks.

        Args:
            name: of the axis.
            groups: global ranks, in order; every rank is in one of them. The same on all ranks.
        """
        own = next(list(members) for members in groups if dist.get_rank() in members)
        if self._splits:
            return self._split(name, groups, own)
        if len(groups) == 1 and name not in self.processors:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        given: dict[str, Any] = {"group_desc": f"mesh_{name}", "timeout": self._timeout}
        if is_nccl():
            given["pg_options"] = nccl_options(self.processors.get(name, 0))
        if self._is_counted_alike:
            group = dist.new_group(own, use_local_synchronization=True, **given)
        else:
            made = {tuple(members): dist.new_group(list(members), **given) for members in groups}
            group = made[tuple(own)]
        assert isinstance(group, ProcessGroup), "this rank is a member"
        return group

    def _split(self, name: str, groups: Sequence[Sequence[int]], own: list[int]) -> ProcessGroup:
        several = [list(members) for members in groups if len(members) > 1]
        group = None
        if several:
            group = dist.split_group(
                split_ranks=several,
                timeout=self._timeout,
                pg_options=nccl_options(self.processors.get(name, 0)),
                group_desc=f"mesh_{name}",
            )
        if len(own) == 1:
            # A rank alone needs no communicator. And torch names a group by how many this rank has made: all ranks
            # must have made equally many, also those that are in no split.
            group = dist.new_group(own, backend="gloo", use_local_synchronization=True, group_desc=f"mesh_{name}")
        assert isinstance(group, ProcessGroup), "this rank is a member"
        return group

    @property
    def _timeout(self) -> timedelta:
        return library_timeout(self.timeout_seconds, nccl=is_nccl())


def _has_made_groups_alike() -> bool:
    """Return whether all ranks are members of equally many groups, and so name a new group alike.

    Collective. It is False if a program has made groups of its own for some ranks only. Then all ranks make all groups.
    """
    world = dist.group.WORLD
    assert world is not None
    counts = exchange(world, [len(_world.pg_names)], device_for_numbers(world))
    return all(count == counts[0] for count in counts)
