"""Messages between neighbours of a ring of ranks on one host, through symmetric memory.

Each rank has two outboxes in its memory, for rank + 1 and for rank - 1; with two ranks, one. An outbox is a ring of
slots. `send` copies into the next slot and raises a flag. `receive` copies out of the slot and raises the flag that
returns it. Messages between two ranks arrive in the order they were sent.

A send waits only while every slot of the outbox holds a message. With as many slots as the receiver may be messages
behind, no send ever waits. Then an order of sends and receives that works with buffered messages cannot block here.
"""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tpkernels.symmetric.memory import ALIGNMENT_BYTES, HostMemory, check_num_bytes
from tpkernels.symmetric.processes import close_to_children
from tpkernels.symmetric.signals import Signals, control_bytes, words_over, wrapped

_OPERATIONS = ("receive", "send")
_RECEIVE, _SEND = range(2)
# A slot begins with a header: the number of elements and the code of their dtype.
_HEADER_BYTES = ALIGNMENT_BYTES
# Codes follow from the dtypes' names, not from their order: ranks may run different versions of torch.
_CODES = {d: zlib.crc32(str(d).encode()) for d in vars(torch).values() if isinstance(d, torch.dtype)}
_NAMES = {code: str(dtype) for dtype, code in _CODES.items()}


class Mailbox:
    """One rank's outboxes and its view of its neighbours'.

    Args:
        memory: the group's symmetric memory.
        slot_bytes: size of a slot's data; a longer message takes several slots.
        num_slots: slots per outbox.
        name: the group's name, for error messages.
        members: global ranks of the group's members, for error messages.
        timeout_seconds: how long to wait for a neighbour.

    Attributes:
        memory, slot_bytes, num_slots: as given.

    Make one with `Mailbox.open`.
    """

    def __init__(
        self,
        memory: HostMemory,
        slot_bytes: int,
        num_slots: int,
        name: str,
        members: list[int],
        timeout_seconds: float,
    ) -> None:
        self.memory, self.slot_bytes, self.num_slots = memory, slot_bytes, num_slots
        self._rank, self._world, self._members = memory.rank, memory.world, members
        size = control_bytes(memory.world)
        self._stride = _HEADER_BYTES + slot_bytes
        self._slots_offset = 2 * size

        def signals(offset: int) -> Signals:
            areas = [words_over(memory.bytes_of(rank, offset, size)) for rank in range(memory.world)]
            remedy = "start the ranks again"  # a mailbox cannot be reset
            return Signals(areas, memory.rank, memory.pids, members, name, _OPERATIONS, timeout_seconds, remedy)

        self._arrivals, self._returns = signals(0), signals(size)
        close_to_children(self, f"the mailbox of group {name}", "memory", "_arrivals", "_returns")
        self._num_sent = [0] * memory.world
        self._num_received = [0] * memory.world

    @classmethod
    def open(cls, group: ProcessGroup, slot_bytes: int, num_slots: int, *, timeout_seconds: float = 300.0) -> Mailbox:
        """Make the mailbox of a group whose ranks share a host; collective.

        Args:
            group: the ranks, over gloo.
            slot_bytes, num_slots: see Mailbox; equal on all ranks.
            timeout_seconds: how long a message waits for a neighbour that is alive.

        Raises:
            MemoryRefused: on all ranks alike; see HostMemory.allocate.
            ValueError: slot_bytes is not a legal number of bytes, or num_slots is below 1.
        """
        check_num_bytes("a mailbox's slot_bytes", slot_bytes)
        if num_slots < 1:
            raise ValueError(f"an outbox needs at least one slot: got num_slots {num_slots}: pass 1 or more")
        slot_bytes = -(-slot_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        world = dist.get_world_size(group)
        # With two ranks both neighbours are the same rank: one outbox each.
        num_outboxes = min(2, world - 1)
        total = 2 * control_bytes(world) + num_outboxes * num_slots * (_HEADER_BYTES + slot_bytes)
        memory = HostMemory.allocate(group, total)
        members = dist.get_process_group_ranks(group)
        return cls(memory, slot_bytes, num_slots, group.group_name, members, timeout_seconds)

    @torch.no_grad()
    def send(self, peer: int, x: Tensor) -> None:
        """Copy a CPU tensor into the outbox for `peer`, a neighbour; `x` may be changed afterwards.

        Raises:
            PeerError: the outbox is full and the peer receives nothing.
        """
        for piece in self._pieces(x.detach().reshape(-1)):
            self.wait_for_room(peer)
            number = self._num_sent[peer]
            header, data = self._slot(self._rank, peer, number, piece)
            header.copy_(torch.tensor([len(piece), _CODES[piece.dtype]]))
            data.copy_(piece)
            self._num_sent[peer] = number + 1
            self._arrivals.notify(peer, wrapped(number + 1))

    def wait_for_room(self, peer: int) -> None:
        """Wait until the outbox for `peer`, a neighbour, has a free slot.

        Raises:
            PeerError: it is full and the peer receives nothing.
        """
        if not self.has_room(peer):
            self._returns.wait(peer, self._return_of_next(peer), _SEND)

    def has_room(self, peer: int) -> bool:
        """Return whether a message of one slot could be sent to `peer` without waiting."""
        return self._num_sent[peer] < self.num_slots or self._returns.has_notified(peer, self._return_of_next(peer))

    def _return_of_next(self, peer: int) -> int:
        """Return the flag value with which the peer returns the slot that the next message takes."""
        return wrapped(self._num_sent[peer] + 1 - self.num_slots)

    @torch.no_grad()
    def receive(self, peer: int, out: Tensor) -> None:
        """Wait for the next message of `peer`, a neighbour, and copy it into `out`, a contiguous CPU tensor.

        Raises:
            ValueError: the message has another size or dtype.
            PeerError: the message does not come.
        """
        for piece in self._pieces(out.detach().view(-1)):
            number = self._num_received[peer]
            self._arrivals.wait(peer, wrapped(number + 1), _RECEIVE)
            header, data = self._slot(peer, self._rank, number, piece)
            num_sent, code = header.tolist()
            if (num_sent, code) != (len(piece), _CODES[piece.dtype]):
                raise ValueError(
                    f"a message must have the size and dtype that are received: rank {self._members[peer]} sent "
                    f"{num_sent} elements of {_NAMES.get(code, 'an unknown dtype')}, rank {self._members[self._rank]} "
                    f"expects {len(piece)} of {piece.dtype}: make both the same"
                )
            piece.copy_(data)
            self._num_received[peer] = number + 1
            self._returns.notify(peer, wrapped(number + 1))

    def has_arrived(self, peer: int, num_before: int = 0) -> bool:
        """Return whether, after `num_before` others, the next message of `peer` has arrived.

        It counts slots: of a message that takes several slots, it answers for the first.
        """
        return self._arrivals.has_notified(peer, wrapped(self._num_received[peer] + num_before + 1))

    def _pieces(self, flat: Tensor) -> tuple[Tensor, ...]:
        return flat.split(max(1, self.slot_bytes // flat.element_size()))

    def _slot(self, owner: int, receiver: int, number: int, piece: Tensor) -> tuple[Tensor, Tensor]:
        """Return header and data of slot `number` of the owner's outbox for `receiver`, shaped as `piece`."""
        ahead = (receiver - owner) % self._world
        assert ahead in (1, self._world - 1), f"rank {owner} has no outbox for {receiver}, which is no neighbour"
        outbox = 0 if ahead == 1 else 1
        offset = self._slots_offset + (outbox * self.num_slots + number % self.num_slots) * self._stride
        header = self.memory.block(owner, offset, (2,), torch.int64)
        return header, self.memory.block(owner, offset + _HEADER_BYTES, piece.shape, piece.dtype)
