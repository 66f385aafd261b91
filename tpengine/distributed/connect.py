"""The first exchange of each group, and what is said if one fails: which group, which ranks, on which hosts.

A dead link between two hosts shows here. Some members of its groups get an error, others wait, and ranks without such a
group would go on. So a rank that gets an error writes it to the store, and every rank looks there while it waits: all
end alike, with one line. If nobody gets an error, the watch ends the run at its limit and names what each rank waits
for: its group.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.pending import Collective, Work
from tpkernels.symmetric.signals import PeerError

from tpengine.distributed.facts import some
from tpengine.last_words import one_line

_POLL_SECONDS = 0.02
# The rank that keeps the store leaves later than the others, which read there why the run ends.
_FAREWELL_SECONDS = 10.0


class GroupError(RuntimeError):
    """A group cannot exchange; one line, the same on all ranks."""


def connect_all(comms: Mapping[str, Communicator], device: torch.device, begin: Callable[[str], None]) -> None:
    """Exchange one number over every group, in the order given; collective over all ranks.

    Args:
        comms: by the names of their groups.
        device: where the groups' tensors live.
        begin: told what is connected, before each group.

    Raises:
        GroupError: on all ranks alike.
    """
    meeting = _Meeting()
    try:
        for name, comm in comms.items():
            if comm.group is not None and comm.size > 1:
                where = f"{name} of {some('rank', dist.get_process_group_ranks(comm.group))}"
                _connect(where, comm, device, meeting, begin)
        begin("hearing whether all groups are connected")
        meeting.wait_for_all()
    except GroupError:
        for comm in comms.values():
            if comm.arena is not None:
                comm.arena.abandon()  # a thread that exchanges there would hold up the end of its process
        raise


def _connect(
    where: str, comm: Communicator, device: torch.device, meeting: _Meeting, begin: Callable[[str], None]
) -> None:
    """Exchange a number over a group of several ranks, and through memory where they share it."""
    begin(f"connecting group {where}")
    rule = f"a group must be able to exchange: the first exchange of {where}"
    hosts = meeting.hosts_of(dist.get_process_group_ranks(comm.group))
    try:
        meeting.wait_for(Collective(dist.all_reduce(torch.zeros(1, device=device), group=comm.group, async_op=True)))
        if comm.arena is not None:
            # By the communicator's thread: this one hears meanwhile what happens to other ranks.
            meeting.wait_for(comm.start_all_reduce(torch.zeros(1, device=device)))
    except GroupError:
        raise
    except PeerError as error:
        meeting.report(f"{rule}{hosts} through memory failed: {error.what}: see what that rank says, and start again")
    except RuntimeError as error:
        meeting.report(
            f"{rule}{hosts} failed: {one_line(str(error))}: check the network between them, and which interface is "
            "used (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
        )


class _Meeting:
    """What the ranks tell each other through the store while they connect; a rank alone tells nobody."""

    def __init__(self) -> None:
        self._store: Any = _get_default_store() if dist.get_world_size() > 1 else None
        if self._store is not None:
            # A program may connect several times.
            self._call = f"connect/{self._store.add(f'connects/{dist.get_rank()}', 1)}"
            self._store.set(f"{self._call}/host/{dist.get_rank()}", socket.gethostname())

    def hosts_of(self, ranks: Sequence[int]) -> str:
        """Return the hosts of ranks in words, of those that are known to be there."""
        keys = [f"{self._call}/host/{rank}" for rank in ranks] if self._store is not None else []
        hosts = [self._store.get(key).decode() for key in keys if self._store.check([key])]
        return f" ({some('host', list(dict.fromkeys(hosts)))})" if hosts else ""

    def report(self, problem: str) -> NoReturn:
        """Report this rank's error, and raise what all ranks raise."""
        if self._store is None:
            raise GroupError(problem)
        number = self._store.add(f"{self._call}/problems", 1)
        self._store.set(f"{self._call}/problem/{number}", problem)
        self._raise_all()

    def wait_for(self, work: Work) -> None:
        """Wait for an exchange of this rank's; raise if another rank has reported an error."""
        while not work.is_complete():
            self._look()
            time.sleep(_POLL_SECONDS)
        work.wait()

    def wait_for_all(self) -> None:
        """Wait until all ranks have connected all their groups; raise if one has reported an error."""
        if self._store is None:
            return
        self._store.add(f"{self._call}/connected", 1)
        while self._store.add(f"{self._call}/connected", 0) < dist.get_world_size():
            self._look()
            time.sleep(_POLL_SECONDS)

    def _look(self) -> None:
        if self._store is not None and self._store.add(f"{self._call}/problems", 0):
            self._raise_all()

    def _raise_all(self) -> NoReturn:
        """Raise the error that was reported first, the same on all ranks."""
        problem = self._store.get(f"{self._call}/problem/1").decode()
        self._store.add(f"{self._call}/heard", 1)
        end = time.monotonic() + _FAREWELL_SECONDS
        while dist.get_rank() == 0 and time.monotonic() < end:
            if self._store.add(f"{self._call}/heard", 0) == dist.get_world_size():
                break
            time.sleep(_POLL_SECONDS)
        raise GroupError(problem)
