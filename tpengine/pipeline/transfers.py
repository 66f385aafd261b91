"""Pipeline transfers: post the plan's sends and receives, and wait where the plan says so.

A transfer is asynchronous between its post and its wait. A receive lands in the static slot that follows from the
plan's live ranges. Slots are separate tensors, since slices of one would share autograd's version counter. A slot is
reused only when no live micro-batch needs it, which the verifier has proved. Over gloo, tensors of a GPU are staged
through the host.

Between CPU ranks of one host messages go through shared memory (`open_mailbox`). Posting a send copies the message into
the receiver's queue. Waiting for a receive copies it out. Waiting for a send waits until the queue has room for another
message. A queue is bounded: it holds one message more than the plan ever has posted and not waited for; mostly that
makes three. So where the plan waits for a send, a rank may wait for a peer that is that far behind, but not for ever.
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
from tpengine.plan.actions import ACTIVATIONS, RECEIVES, TRANSFERS


def open_mailbox(
    plans: Sequence[Plan], group: ProcessGroup, device: torch.device, timeout_seconds: float
) -> Mailbox | None:
    """Open shared memory for the messages of plans, between CPU ranks of one host; collective.

    Args:
        plans: the verified plans that will run on it, of the same chunks.
        group: the pipeline's ranks, in stage order.
        device: where tensors live.
        timeout_seconds: how long a message waits for a rank that is alive.

    Returns:
        The mailbox. None if messages go through the process group: on GPUs, for one rank, if neighbouring chunks lie on
        ranks that are not neighbours, or if the ranks are on several hosts or the memory is refused (rank 0 prints so).

    Memory: two queues of `num_slots_for` messages per rank.
    """
    plan = plans[0]
    if device.type != "cpu" or dist.get_world_size(group) == 1 or not _is_ring(plan):
        return None
    specs = [chunk.input for each in plans for chunk in each.chunks if chunk.input is not None]
    slot_bytes = max(math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize for spec in specs)
    num_slots = max(num_slots_for(plan) for plan in plans)
    try:
        return Mailbox.open(group, slot_bytes, num_slots, timeout_seconds=timeout_seconds)
    except MemoryRefused as error:
        if dist.get_rank(group) == 0:
            print(f"tpengine: pipeline messages go through the process group: {error}", file=sys.stderr)
        return None


def num_slots_for(plan: Plan) -> int:
    """Return how many messages a queue must hold so that nothing in the plan waits for ever.

    The verifier has proved that the plan finishes even if every send, or the wait for it, blocks until its receive is
    posted. Let n be the most receives from one peer that a rank ever has posted and not yet waited for. When a receive
    is posted, at most n messages of that peer, this one included, have not been taken out of the queue. So a queue of
    n messages accepts the send. A queue of n + 1 has room again after it, which the wait for the send needs.
    """
    return 1 + max(_most_untaken(plan, actions) for actions in plan.actions)


def _most_untaken(plan: Plan, actions: Sequence[Action]) -> int:
    """Return the most receives from one peer that a rank has posted and not yet waited for."""
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
            # Messages are taken in the order they were posted, so that a wait also takes all earlier ones.
            while action.kind is Kind.WAIT and transfer in of_peer:
                of_peer.popleft()
    return most


def _is_ring(plan: Plan) -> bool:
    """Return whether all messages go to a neighbour on the ring of ranks."""
    steps = {(b.rank - a.rank) % plan.num_ranks for a, b in pairwise(plan.chunks)}
    return steps <= {0, 1, plan.num_ranks - 1}


def direction_groups(group: ProcessGroup, backward: ProcessGroup | None) -> dict[Kind, ProcessGroup]:
    """Return what carries each kind of transfer: `group` activations, `backward` gradients, `group` without it."""
    return {kind: group if kind in ACTIVATIONS else backward or group for kind in TRANSFERS}


class Transfers:
    """The transfers of one pipeline rank for one plan.

    Args:
        plan: the verified plan.
        stage: this rank's place in the pipeline.
        group: the pipeline's ranks, in stage order.
        fetch: action -> tensor to send.
        deliver: (action, tensor) -> None, called when a receive has been waited for; the tensor is a slot.
        device: where tensors live.
        mailbox: carries the messages; None for the process group.
        backward: the same ranks again, to carry gradients; default `group`. Over NCCL a communicator of its own: one
            runs its transfers one after another, so that an early receive of a gradient would hold up an activation.

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
        backward: ProcessGroup | None = None,
    ) -> None:
        assert mailbox is None or num_slots_for(plan) <= mailbox.num_slots, "the mailbox was opened for other plans"
        self._plan, self._device = plan, device
        self._groups = direction_groups(group, backward)
        self._mailbox = mailbox
        # By peer, the receives in the order they were posted: messages arrive in that order, not in that of the waits.
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
        # A batch of one: so NCCL uses the group's communicator instead of making one for each pair of ranks.
        posted = dist.P2POp(operation, tensor, group=self._groups[action.kind], group_peer=peer)
        (work,) = dist.batch_isend_irecv([posted])
        self._pending[action] = (work, tensor)

    def wait(self, transfer: Action) -> None:
        """Wait for one transfer: deliver a received tensor, or free a sent one and have room for the next."""
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
        """Whether posting a send and waiting for a receive copy the data themselves, as a mailbox does."""
        return self._mailbox is not None

    def is_complete(self, transfer: Action) -> bool:
        """Return whether `wait` would not have to wait, except for a copy out of the mailbox; for a trace."""
        if self._mailbox is None:
            work, _ = self._pending[transfer]
            return bool(work.is_completed())
        peer = self._plan.peer(transfer)
        if transfer.kind not in RECEIVES:
            return self._mailbox.has_room(peer)
        return transfer in self._arrived or self._mailbox.has_arrived(peer, self._posted[peer].index(transfer))

    def _take(self, mailbox: Mailbox, transfer: Action) -> None:
        """Copy messages into their slots, in order, up to that of `transfer`."""
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
