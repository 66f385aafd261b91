"""Links of the simulator: when a transfer begins, and when the tensor has arrived.

There is one in-order channel for each ordered pair of ranks. A transfer begins when both sides have posted it and all
earlier transfers of its channel have left the sender. It occupies the channel for bytes / bandwidth and arrives
`latency` later. Only then is it complete for both sides: the sender keeps its buffer until the tensor has arrived.

Shared memory and gloo are such links. NCCL runs all transfers of a rank in one communicator one after another, which is
not modelled: where an early receive holds up a send, its steps take longer than is said here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tpengine.plan.actions import SENDS, Action, counterpart
from tpengine.plan.plan import Plan
from tpengine.plan.timeline import Span
from tpengine.simulate.costs import Costs, tensor_of, transfer_bytes


@dataclass(slots=True)
class Event:
    """A span of a rank, and the event whose end let it begin."""

    rank: int
    span: Span
    cause: Event | None


@dataclass(slots=True)
class _Post:
    """One side of a transfer: when a rank has posted it, and after which event."""

    rank: int
    action: Action
    time: float
    cause: Event | None


@dataclass(slots=True)
class _Tensor:
    """A boundary tensor on its way, with the post of each side."""

    send: _Post | None = None
    receive: _Post | None = None


@dataclass(slots=True)
class _Channel:
    """Transfers that the sender has posted and that have not begun, oldest first; the time when it is free again."""

    latency: float
    bytes_per_time: float
    queue: deque[_Tensor] = field(default_factory=deque)
    free: float = 0.0
    last: Event | None = None


class Links:
    """All channels of a plan.

    Args: plan: for peers and bytes. costs: for latency and bandwidth.
    """

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self._plan, self._costs = plan, costs
        self._tensors: dict[tuple[bool, int, int], _Tensor] = {}
        self._channels: dict[tuple[int, int], _Channel] = {}
        self._bytes: dict[tuple[bool, int], float] = {}

    def post(self, rank: int, transfer: Action, time: float, cause: Event | None) -> list[Event]:
        """Post one side of a transfer.

        Returns: the transfers whose times are known now, each as two events, the sender's and the receiver's.
        """
        tensor = self._tensors.setdefault(tensor_of(transfer), _Tensor())
        post, peer = _Post(rank, transfer, time, cause), self._plan.peer(transfer)
        if transfer.kind in SENDS:
            tensor.send = post
            channel = self._channel(rank, peer)
            channel.queue.append(tensor)
        else:
            tensor.receive = post
            channel = self._channel(peer, rank)
        begun: list[Event] = []
        while channel.queue and channel.queue[0].receive is not None:
            begun += self._carry(channel, channel.queue.popleft())
        return begun

    def missing(self, rank: int, awaited: Action) -> tuple[Action, int]:
        """Return what prevents a transfer from beginning: the transfer that is not posted, and the rank to post it."""
        tensor = self._tensors.get(tensor_of(awaited), _Tensor())
        own, other = (tensor.send, tensor.receive)[:: 1 if awaited.kind in SENDS else -1]
        peer = self._plan.peer(awaited)
        if own is None:
            return awaited, rank
        if other is None or awaited.kind in SENDS:
            return awaited, peer
        # The sender has posted it after another transfer that this rank has not posted.
        first = self._channel(peer, rank).queue[0].send
        assert first is not None, "a channel holds posted sends only"
        return counterpart(first.action), rank

    def _channel(self, source: int, destination: int) -> _Channel:
        found = self._channels.get((source, destination))
        if found is None:
            found = self._channels[source, destination] = _Channel(*self._costs.link(source, destination))
        return found

    def _carry(self, channel: _Channel, tensor: _Tensor) -> tuple[Event, Event]:
        """Compute the times of the next transfer of a channel, which both sides have posted."""
        send, receive = tensor.send, tensor.receive
        assert send is not None and receive is not None, "a transfer begins when both sides have posted it"
        start, cause = send.time, send.cause
        if receive.time > start:
            start, cause = receive.time, receive.cause
        if channel.free > start:
            start, cause = channel.free, channel.last
        channel.free = start + self._num_bytes(send.action) / channel.bytes_per_time
        end = channel.free + channel.latency
        channel.last = Event(send.rank, Span(send.action, start, end), cause)
        return channel.last, Event(receive.rank, Span(receive.action, start, end), cause)

    def _num_bytes(self, send: Action) -> float:
        is_forward, chunk, _ = tensor_of(send)
        found = self._bytes.get((is_forward, chunk))
        if found is None:
            found = self._bytes[is_forward, chunk] = transfer_bytes(self._plan, send)
        return found
