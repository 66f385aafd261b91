"""Pipeline transfers: posts the plan's sends and receives, waits where the plan says so.

Everything is asynchronous between post and wait. A receive lands in the static slot the plan's live ranges give it;
slots are separate tensors (slices of one would share autograd's version counter) and are reused only when no live
micro-batch needs them, which the verifier has proved. Over gloo, tensors of a GPU are staged through the host.

Between CPU ranks of one host messages go through shared memory (`open_mailbox`): posting a send copies it into the
receiver's queue, waiting for a receive copies it out, waiting for a send until the queue has room for another. It is
bounded: by what the plan ever has posted and not waited for, and one, mostly three messages. So a rank waits for one
that is so far behind, where the plan waits for the send, and never for ever.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from tpkernels.exchange.mailbox import Mailbox
from tpkernels.symmetric.host_memory import MemoryRefused

from tpengine.plan import Action, Kind, Plan, TensorSpec, receive_slots
from tpengine.plan.actions import RECEIVES


def open_mailbox(
    plans: Sequence[Plan], group: ProcessGroup, device: torch.device, timeout_seconds: float
) -> Mailbox | None:
    """Open shared memory for the messages of plans, between CPU ranks of one host; collective.

    Args:
        plans: the verified plans that will run on it, of the same chunks.
        group: the pipeline's ranks, in stage order.
        device: where tensors live.
        timeout_seconds: how long a message waits for a rank that lives.

    Returns:
        None on GPUs, for one rank, where neighbouring chunks lie on ranks that are no neighbours, and where the ranks
        are on several hosts or the memory is refused, which is said: then messages go through the process group.

    Memory: a rank's two queues of `num_slots_for` messages.
    """
    plan = plans[0]
    if device.type != "cpu" or dist.get_world_size(group) == 1 or not _is_ring(plan):
        return None
    specs = [chunk.input for chunk in plan.chunks if chunk.input is not None]
    slot_bytes = max(math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize for spec in specs)
    num_slots = max(num_slots_for(plan) for plan in plans)
    try:
        return Mailbox.open(group, slot_bytes, num_slots, timeout_seconds=timeout_seconds)
    except MemoryRefused as error:
        if dist.get_rank(group) == 0:
            print(f"tpengine: pipeline messages go through the process group: {error}", file=sys.stderr)
        return None


def num_slots_for(plan: Plan) -> int:
    """How many messages a queue must hold so that nothing in the plan waits for ever.

    The verified plan finishes where a send, or the wait for it, blocks until its receive is posted. When a receive is
    posted, all that came from that peer is taken but what a rank ever has posted for and not taken. A queue of so many
    messages lets the send through, and with one more there is room again behind it.
    """
    return 1 + max(_most_untaken(plan, actions) for actions in plan.actions)


def _most_untaken(plan: Plan, actions: Sequence[Action]) -> int:
    """The most receives from one peer that a rank has posted and not taken yet."""
    posted: defaultdict[int, deque[Action]] = defaultdict(deque)
    most = 0
    for action in actions:
        for transfer in action.subs or (action,):
            if transfer.kind not in RECEIVES:
                continue
            of_peer = posted[plan.peer(transfer)]
            if action.kind is not Kind.WAIT:
                of_peer.append(transfer)
                most = max(most, len(of_peer))
            # Taken in the order they were posted; one may have been taken on the way to another.
            while action.kind is Kind.WAIT and transfer in of_peer:
                of_peer.popleft()
    return most


def _is_ring(plan: Plan) -> bool:
    """Whether all messages go to a neighbour on the ring of ranks."""
    steps = {(b.rank - a.rank) % plan.num_ranks for a, b in pairwise(plan.chunks)}
    return steps <= {0, 1, plan.num_ranks - 1}


class Transfers:
    """The transfers of one pipeline rank for one plan.

    Args:
        plan: the verified plan.
        stage: this rank's place in the pipeline.
        group: the pipeline's ranks, in stage order.
        fetch: action -> tensor to send.
        deliver: (action, tensor) -> None, called when a receive is waited for; the tensor is a slot.
        device: where tensors live.
        mailbox: carries the messages; None for the process group.

    Memory: the receive slots, whose number follows from the plan, and the tensors being sent.
    """

    def __init__(
        self,
        plan: Plan,
        stage: int,
        group: ProcessGroup,
        fetch: Callable[[Action], Tensor],
        deliver: Callable[[Action, Tensor], None],
        device: torch.device,
        mailbox: Mailbox | None = None,
    ) -> None:
        assert mailbox is None or num_slots_for(plan) <= mailbox.num_slots, "the mailbox was opened for other plans"
        self._plan, self._group, self._device = plan, group, device
        self._mailbox = mailbox
        # Messages of a rank arrive in the order they were posted, whichever is waited for first.
        self._posted: dict[int, deque[Action]] = {}
        self._arrived: set[Action] = set()
        self._fetch, self._deliver = fetch, deliver
        self._staged = device.type == "cuda" and dist.get_backend(group) == "gloo"
        self._slot_numbers = receive_slots(plan.actions[stage])
        self._slots: dict[tuple[Kind, int, TensorSpec], Tensor] = {}
        self._pending: dict[Action, tuple[Any, Tensor]] = {}

    def post(self, action: Action) -> None:
        """Start a send or a receive."""
        peer, receives = self._plan.peer(action), action.kind in RECEIVES
        if self._mailbox is not None:
            if receives:
                self._posted.setdefault(peer, deque()).append(action)
            else:
                self._mailbox.send(peer, self._fetch(action))
            return
        tensor = self._slot(action) if receives else self._to_link(self._fetch(action))
        operation = dist.irecv if receives else dist.isend
        # A batch of one: over NCCL it goes through the group's own communicator, and none is made for each pair.
        (work,) = dist.batch_isend_irecv([dist.P2POp(operation, tensor, group=self._group, group_peer=peer)])
        self._pending[action] = (work, tensor)

    def wait(self, transfer: Action) -> None:
        """Wait for one transfer; a received tensor is delivered, a sent one let go, and room made for another."""
        if self._mailbox is not None:
            if transfer.kind in RECEIVES:
                self._take(self._mailbox, transfer)
                self._deliver(transfer, self._slot(transfer))
            else:
                self._mailbox.wait_for_room(self._plan.peer(transfer))
            return
        work, tensor = self._pending.pop(transfer)
        work.wait()
        if transfer.kind in RECEIVES:
            self._deliver(transfer, tensor.to(self._device) if self._staged else tensor)

    @property
    def copies(self) -> bool:
        """Whether posting a send and waiting for a receive move the data themselves: through a mailbox."""
        return self._mailbox is not None

    def is_complete(self, transfer: Action) -> bool:
        """Whether `wait` would find the transfer done, but for the copy out of a mailbox; for a trace."""
        if self._mailbox is None:
            work, _ = self._pending[transfer]
            return bool(work.is_completed())
        peer = self._plan.peer(transfer)
        if transfer.kind not in RECEIVES:
            return self._mailbox.has_room(peer)
        return transfer in self._arrived or self._mailbox.has_arrived(peer, self._posted[peer].index(transfer))

    def _take(self, mailbox: Mailbox, transfer: Action) -> None:
        """Copy messages into their slots until that of `transfer` has come."""
        peer = self._plan.peer(transfer)
        while transfer not in self._arrived:
            oldest = self._posted[peer].popleft()
            mailbox.receive(peer, self._slot(oldest))
            self._arrived.add(oldest)
        self._arrived.remove(transfer)

    def _to_link(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if self._staged else tensor.contiguous()

    def _slot(self, receive: Action) -> Tensor:
        spec = self._spec(receive)
        key = (receive.kind, self._slot_numbers.slot(receive), spec)
        if key not in self._slots:
            device = torch.device("cpu") if self._staged else self._device
            self._slots[key] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        return self._slots[key]

    def _spec(self, receive: Action) -> TensorSpec:
        chunk = self._plan.chunks[receive.piece[0]]
        spec = chunk.input if receive.kind is Kind.RECV_F else chunk.output
        assert spec is not None, f"{receive}: the chunk has nothing to receive"
        return spec
