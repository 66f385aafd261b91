"""Links of the simulator: when a transfer begins, and when the tensor has arrived.

A transfer begins when both sides have posted it and it is the next on its channels (`Costs.channels`):

    pair         one channel for each ordered pair of ranks, in the order of the sender's posts. A tensor occupies it
                 for bytes / bandwidth, and arrives `latency` later: the next one may leave meanwhile
    direction    two channels for each rank, one for activations and one for gradients, sent or received, in the order
                 of the rank's posts. A transfer is on one channel of either side, and occupies both until it arrived
    one          the same with one channel for each rank

Whatever the channels are, a transfer is complete for both sides when the tensor has arrived: the sender keeps its
buffer until then.

The decision a reader will question: direction and one have no overlap of latencies. NCCL runs an operation as a kernel
that ends when the receiver has the data, and the next kernel of the communicator begins behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from tpengine.plan.actions import SENDS, Action, counterpart
from tpengine.plan.clock import Span
from tpengine.plan.plan import Plan
from tpengine.planner.costs import Channels, Costs, tensor_of, transfer_bytes


@dataclass(slots=True)
class CausedSpan:
    """A span of a rank, and the event whose end let it begin."""

    rank: int
    span: Span
    cause: CausedSpan | None


@dataclass(slots=True)
class _Post:
    """One side of a transfer: when a rank has posted it, and after which event."""

    rank: int
    action: Action
    time: float
    cause: CausedSpan | None


@dataclass(slots=True)
class _Tensor:
    """A boundary tensor on its way: the post of each side, and the channels that it is on."""

    send: _Post | None = None
    receive: _Post | None = None
    channels: tuple[_Channel, ...] = ()

    @property
    def may_begin(self) -> bool:
        """Whether both sides have posted it, and it is the next on each channel."""
        if self.send is None or self.receive is None:
            return False
        return all(channel.queue and channel.queue[0] is self for channel in self.channels)


@dataclass(slots=True)
class _Channel:
    """Transfers that a rank has posted and that have not begun, oldest first; the time when it is free again."""

    rank: int
    queue: deque[_Tensor] = field(default_factory=deque)
    free: float = 0.0
    last: CausedSpan | None = None


class Links:
    """All channels of a plan.

    Args: plan: for peers and bytes. costs: for channels, latency and bandwidth.
    """

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self._plan, self._costs = plan, costs
        self._by_pair = costs.channels is Channels.PAIR
        self._tensors: dict[tuple[bool, int, int], _Tensor] = {}
        self._channels: dict[Hashable, _Channel] = {}
        self._bytes: dict[tuple[bool, int], float] = {}

    def post(self, rank: int, transfer: Action, time: float, cause: CausedSpan | None) -> list[CausedSpan]:
        """Post one side of a transfer.

        Returns: the transfers whose times are known now, each as two events, the sender's and the receiver's.
        """
        tensor = self._tensors.get(tensor_of(transfer))
        if tensor is None:
            tensor = self._tensors[tensor_of(transfer)] = _Tensor(channels=self._channels_of(rank, transfer))
        post, sends = _Post(rank, transfer, time, cause), transfer.kind in SENDS
        if sends:
            tensor.send = post
        else:
            tensor.receive = post
        # A pair's channel holds what the sender has posted. A rank's own holds what that rank has.
        own, other = tensor.channels[0], tensor.channels[-1]
        if not self._by_pair:
            (own if sends else other).queue.append(tensor)
        elif sends:
            own.queue.append(tensor)
        # What begins lets the next ones of its channels begin.
        begun: list[CausedSpan] = []
        candidates = [tensor]
        while candidates:
            candidate = candidates.pop()
            if candidate.may_begin:
                begun += self._carry(candidate)
                candidates += [channel.queue[0] for channel in candidate.channels if channel.queue]
        return begun

    def missing(self, rank: int, awaited: Action) -> tuple[Action, int]:
        """Return what prevents a transfer from beginning: the transfer that is not posted, and the rank to post it."""
        tensor = self._tensors.get(tensor_of(awaited), _Tensor())
        own, other = (tensor.send, tensor.receive)[:: 1 if awaited.kind in SENDS else -1]
        if own is None:
            return awaited, rank
        if other is None:
            return awaited, self._plan.peer(awaited)
        # Both sides have posted it, but on a channel another transfer is the next: who is at its other end lacks it, or
        # has it behind others itself.
        channel = next(channel for channel in tensor.channels if channel.queue[0] is not tensor)
        first = channel.queue[0]
        here = next(post for post in (first.send, first.receive) if post is not None and post.rank == channel.rank)
        return counterpart(here.action), self._plan.peer(here.action)

    def _channels_of(self, rank: int, transfer: Action) -> tuple[_Channel, ...]:
        """Return the channels of a transfer: the pair's, or the sender's and the receiver's."""
        ends = (rank, self._plan.peer(transfer))[:: 1 if transfer.kind in SENDS else -1]
        if self._by_pair:
            return (self._channels.setdefault(ends, _Channel(ends[0])),)
        is_forward = tensor_of(transfer)[0] and self._costs.channels is Channels.DIRECTION
        return tuple(self._channels.setdefault((end, is_forward), _Channel(end)) for end in ends)

    def _carry(self, tensor: _Tensor) -> tuple[CausedSpan, CausedSpan]:
        """Compute the times of a transfer that may begin, and take it from its channels."""
        send, receive = tensor.send, tensor.receive
        assert send is not None and receive is not None, "a transfer begins when both sides have posted it"
        # It begins after the last of what it waits for: either post, and each channel.
        start, cause = send.time, send.cause
        for time, of in ((receive.time, receive.cause), *((channel.free, channel.last) for channel in tensor.channels)):
            if time > start:
                start, cause = time, of
        latency, bytes_per_time = self._costs.link(send.rank, receive.rank)
        left = start + self._num_bytes(send.action) / bytes_per_time
        end = left + latency
        sent = CausedSpan(send.rank, Span(send.action, start, end), cause)
        for channel in tensor.channels:
            channel.queue.popleft()
            channel.free, channel.last = left if self._by_pair else end, sent
        return sent, CausedSpan(receive.rank, Span(receive.action, start, end), cause)

    def _num_bytes(self, send: Action) -> float:
        is_forward, chunk, _ = tensor_of(send)
        found = self._bytes.get((is_forward, chunk))
        if found is None:
            found = self._bytes[is_forward, chunk] = transfer_bytes(self._plan, send)
        return found
