"""A room: memory that exists once on a host, which the ranks of a group write and read in turns.

    written     every rank may write its own part; no rank reads
    read        every rank may read everything; no rank writes

`meet` ends a turn, and each turn is one of these patterns (signals.py, patterns 1 and 3):

 1. Write, then meet, then read. A rank raises its flag for every peer after its last write of the turn, and a peer
    reads when it has seen the flags of all: so it reads what every rank has written, and nothing half written.
 2. Read, then meet, then write. A rank raises its flag after its last read of the turn, and a peer writes when it has
    seen the flags of all: so no rank reads what belongs to the next turn, and no value changes under its reader.

The decision a reader will question: ranks meet as a whole, and not for one part each. Where all ranks need all parts,
a turn of one part could begin earlier, but only by what the fastest rank is ahead of the slowest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.symmetric.memory import ALIGNMENT_BYTES, HostMemory
from tpkernels.symmetric.processes import close_to_children
from tpkernels.symmetric.signals import Signals, control_bytes, words_over, wrapped

OPERATIONS = ("a turn to write", "a turn to read")


class Room:
    """One rank's view of a group's room. Make one with `Room.open`.

    Args:
        memory: the same on every rank.
        name: of the group, for messages.
        members: global ranks of the group's members, for messages.
        timeout_seconds: how long to wait for a peer that is alive.

    Attributes:
        signals: flags and poison.
    """

    def __init__(self, memory: HostMemory, name: str, members: Sequence[int], timeout_seconds: float) -> None:
        self._memory = memory
        self._data_offset, size = _offset_of_data(memory.world), control_bytes(memory.world)
        areas = [words_over(memory.bytes_of(0, rank * size, size)) for rank in range(memory.world)]
        self.signals = Signals(areas, memory.rank, memory.pids, members, name, OPERATIONS, timeout_seconds)
        close_to_children(self, f"the room of group {name}", "signals")
        self._peers = [rank for rank in range(memory.world) if rank != memory.rank]
        self._epoch = 0

    @classmethod
    def open(cls, group: ProcessGroup, num_bytes: int, *, timeout_seconds: float = 300.0) -> Room:
        """Make the room of a group whose ranks share a host; collective.

        Args:
            group: the ranks, over gloo.
            num_bytes: of its data, once for all ranks.
            timeout_seconds: how long to wait for a peer that is alive.

        Raises:
            MemoryRefused, ValueError: on all ranks alike; see HostMemory.allocate.
        """
        # The last bytes are those that ranks know each other's memory by.
        total = _offset_of_data(dist.get_world_size(group)) + num_bytes + ALIGNMENT_BYTES
        memory = HostMemory.allocate_once(group, total)
        return cls(memory, group.group_name, dist.get_process_group_ranks(group), timeout_seconds)

    def view(self, offset_bytes: int, numel: int, dtype: torch.dtype) -> Tensor:
        """View part of the data as a flat tensor; forked processes may read it too."""
        return self._memory.block(0, self._data_offset + offset_bytes, (numel,), dtype)

    def meet(self, *, to_write: bool) -> None:
        """End this rank's turn, and return when all ranks have ended theirs; collective.

        Args:
            to_write: the turn that begins, for messages.

        Raises:
            PeerError: a rank has ended, or does not come.
        """
        self.signals.raise_if_poisoned()
        self._epoch += 1
        for peer in self._peers:
            self.signals.notify(peer, wrapped(self._epoch))
        operation = OPERATIONS.index("a turn to write" if to_write else "a turn to read")
        for peer in self._peers:
            self.signals.wait(peer, wrapped(self._epoch), operation)


def _offset_of_data(world: int) -> int:
    return -(-world * control_bytes(world) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
