"""Messages between neighbours of a ring of ranks on one host, through symmetric memory.

Each rank has two outboxes in its memory, for rank + 1 and for rank - 1 (one of two ranks), each a ring of slots. `send`
copies into the next slot and raises a flag; `receive` copies out of it and raises the flag that gives the slot back.
Messages of a pair arrive in the order they were sent.

A send waits only if every slot of the outbox still holds something: with as many slots as the receiver may be behind
it never does, and no order of sends and receives that works with buffered messages can block.
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
# What a slot begins with: the number of elements and their dtype's code.
_HEADER_BYTES = ALIGNMENT_BYTES
# By name, not by order: the ranks may run several versions of torch.
_CODES = {d: zlib.crc32(str(d).encode()) for d in vars(torch).values() if isinstance(d, torch.dtype)}
_NAMES = {code: str(dtype) for dtype, code in _CODES.items()}


class Mailbox:
    """One rank's outboxes and its view of its neighbours'.

    Args:
        memory: the group's symmetric memory.
        slot_bytes: data of one slot; longer messages take several.
        num_slots: of each outbox.
        name: the group, for messages.
        members: numbers of the ranks among all processes, for messages.
        timeout_seconds: how long to wait for a neighbour.

    Attributes:
        memory, slot_bytes, num_slots: as given.

    Use `Mailbox.open`.
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
            timeout_seconds: how long a message waits for a neighbour that lives.

        Raises:
            MemoryRefused: on all ranks alike; see HostMemory.allocate.
            ValueError: no number of bytes, or of slots.
        """
        check_num_bytes("a mailbox's slot_bytes", slot_bytes)
        if num_slots < 1:
            raise ValueError(f"an outbox needs a slot at least: got num_slots {num_slots}: pass 1 or more")
        slot_bytes = -(-slot_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        world = dist.get_world_size(group)
        # Of two ranks each is the other's neighbour on both sides, and has one outbox.
        num_outboxes = min(2, world - 1)
        total = 2 * control_bytes(world) + num_outboxes * num_slots * (_HEADER_BYTES + slot_bytes)
        memory = HostMemory.allocate(group, total)
        members = dist.get_process_group_ranks(group)
        return cls(memory, slot_bytes, num_slots, group.group_name, members, timeout_seconds)

    @torch.no_grad()
    def send(self, peer: int, x: Tensor) -> None:
        """Copy a CPU tensor into the outbox for `peer`, a neighbour; `x` may be changed afterwards.

        Raises:
            PeerError: the outbox is full and the peer takes nothing.
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
            PeerError: it is full and the peer takes nothing.
        """
        if not self.has_room(peer):
            self._returns.wait(peer, self._return_of_next(peer), _SEND)

    def has_room(self, peer: int) -> bool:
        """Whether a message of one slot for `peer` would be sent at once."""
        return self._num_sent[peer] < self.num_slots or self._returns.has_notified(peer, self._return_of_next(peer))

    def _return_of_next(self, peer: int) -> int:
        """Which slot that the peer gives back is the one that the next message takes."""
        return wrapped(self._num_sent[peer] + 1 - self.num_slots)

    @torch.no_grad()
    def receive(self, peer: int, out: Tensor) -> None:
        """Wait for the next message of `peer`, a neighbour, and copy it into `out`, a contiguous CPU tensor.

        Raises:
            ValueError: the message has another size or dtype.
            PeerError: it does not come.
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
        """Whether `receive` would find its message of `peer` there, after receiving `num_before` others.

        Messages of one slot are counted: one that takes several is told to be there with its first part.
        """
        return self._arrivals.has_notified(peer, wrapped(self._num_received[peer] + num_before + 1))

    def _pieces(self, flat: Tensor) -> tuple[Tensor, ...]:
        return flat.split(max(1, self.slot_bytes // flat.element_size()))

    def _slot(self, owner: int, receiver: int, number: int, piece: Tensor) -> tuple[Tensor, Tensor]:
        """Header and data of slot `number` of the owner's outbox for `receiver`, shaped as `piece`."""
        ahead = (receiver - owner) % self._world
        assert ahead in (1, self._world - 1), f"rank {owner} has no outbox for {receiver}, which is no neighbour"
        outbox = 0 if ahead == 1 else 1
        offset = self._slots_offset + (outbox * self.num_slots + number % self.num_slots) * self._stride
        header = self.memory.block(owner, offset, (2,), torch.int64)
        return header, self.memory.block(owner, offset + _HEADER_BYTES, piece.shape, piece.dtype)
