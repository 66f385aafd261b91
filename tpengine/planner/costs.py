"""Costs: how long each action takes and how many bytes it holds, for the simulator.

    unit_costs(plan)     a forward of all layers of a rank takes 1, its backward 2, its halves 1 each; links are free
    costs from a model   modelled/costs.py: flops and bytes over the rates of a machine
    measured costs       profiles/: what a run has measured, kept as JSON

The simulator plays one data-parallel replica of a pipeline and one tensor-parallel rank per stage, because the others
do the same at the same time. How many there are only changes the durations. With 625 replicas a bucket's entry in
`reductions` is `ring_time(bytes, 625, ...)`, that in `gathers` half as much; a stage's durations are those of one of
its tp ranks, including its exchanges. So 10,000 ranks cost no more to simulate than 16.

Links of the simulator: when a transfer begins, and when the tensor has arrived.

There is one in-order channel for each ordered pair of ranks. A transfer begins when both sides have posted it and all
earlier transfers of its channel have left the sender. It occupies the channel for bytes / bandwidth and arrives
`latency` later. Only then is it complete for both sides: the sender keeps its buffer until the tensor has arrived.

Shared memory and gloo are such links. NCCL runs all transfers of a rank in one communicator one after another, which is
not modelled: where an early receive holds up a send, its steps take longer than is said here.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from tpengine.dtypes import dtype_bytes
from tpengine.plan.actions import COMPUTE, SENDS, TRANSFERS, Action, Kind, counterpart, peer_chunk
from tpengine.plan.clock import Span, unit_durations
from tpengine.plan.plan import Plan, TensorSpec


@dataclass(frozen=True)
class ChunkBytes:
    """What one micro-batch holds on a chunk, in bytes, without boundary tensors, which are counted from the plan.

    Args:
        saved: from the start of F to the end of B, or of I in a split backward.
        deferred: from the end of I to the end of W: what the weight half needs.
        working: only while an action runs, by its kind.
    """

    saved: float = 0.0
    deferred: float = 0.0
    working: Mapping[Kind, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Costs:
    """Costs of one plan; all times are in one unit.

    Args:
        compute: duration of a compute action by (kind, chunk); above 0.
        latency: from the start of a transfer to the arrival of its first byte.
        bytes_per_time: bandwidth of a link between two pipeline ranks, per direction; infinite for a free link.
        links: latency and bandwidth, from one pipeline rank to another, of pairs whose link is another one.
        reductions: duration of a bucket's reduction over its ranks, by bucket index; missing ones take no time.
        gathers: the same of the gather of a bucket's weights.
        reduce_share: of a gather or reduction, by how much it prolongs the computation that starts it: 0 where
            something else makes it, 1 where the same core does.
        ties, clip, step: durations of a TIE_REDUCE, of CLIP and of STEP.
        activations: by chunk, what one micro-batch holds; missing ones hold nothing.
        resident: by rank, bytes held all the time: weights, gradients, moments.
        weights: by bucket, the bytes of its gathered weights: held from the start of the action that starts the gather
            to the end of the one that frees them. Only for SLICED buckets.
        contributions: by bucket, the bytes of its whole gradient buffer: held from the start of the action that fills
            it until its reduction has been waited for. Only for buckets that are reduced every micro-batch.
    """

    compute: Mapping[tuple[Kind, int], float]
    latency: float = 0.0
    bytes_per_time: float = math.inf
    links: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    reductions: Mapping[int, float] = field(default_factory=dict)
    gathers: Mapping[int, float] = field(default_factory=dict)
    reduce_share: float = 0.0
    ties: float = 0.0
    clip: float = 0.0
    step: float = 0.0
    activations: Mapping[int, ChunkBytes] = field(default_factory=dict)
    resident: tuple[float, ...] = ()
    weights: Mapping[int, float] = field(default_factory=dict)
    contributions: Mapping[int, float] = field(default_factory=dict)

    def duration(self, action: Action) -> float:
        """Return how long an action occupies its rank; posting and waiting take no time.

        Raises:
            ValueError: a compute action whose duration is not known or not above 0.
        """
        if action.kind in COMPUTE:
            assert action.chunk is not None
            found = self.compute.get((action.kind, action.chunk), 0.0)
            if not found > 0.0:
                raise ValueError(
                    f"every compute action needs a duration above 0: {action.kind} of chunk {action.chunk} has {found}"
                )
            return found
        return {Kind.TIE_REDUCE: self.ties, Kind.CLIP: self.clip, Kind.STEP: self.step}.get(action.kind, 0.0)

    def link(self, source: int, destination: int) -> tuple[float, float]:
        """Return latency and bandwidth from one pipeline rank to another."""
        return self.links.get((source, destination), (self.latency, self.bytes_per_time))

    @property
    def holds_bytes(self) -> bool:
        """Return whether the costs include any memory."""
        return bool(self.activations or self.resident or self.weights or self.contributions)


def tensor_of(transfer: Action) -> tuple[bool, int, int]:
    """Return what a transfer moves, alike for both sides: (is an activation, chunk that produced it, micro-batch)."""
    chunk, microbatch = transfer.piece
    is_forward = transfer.kind in (Kind.SEND_F, Kind.RECV_F)
    return is_forward, chunk if transfer.kind in SENDS else peer_chunk(transfer), microbatch


def transfer_bytes(plan: Plan, transfer: Action) -> int:
    """Return the bytes that a send or receive moves."""
    assert transfer.kind in TRANSFERS, f"{transfer} is not a transfer"
    chunk = plan.chunks[transfer.piece[0]]
    spec = chunk.output if transfer.kind in (Kind.SEND_F, Kind.RECV_B) else chunk.input
    assert spec is not None, f"{transfer}: the chunk has no tensor on that side"
    return spec_bytes(spec)


def spec_bytes(spec: TensorSpec) -> int:
    """Return the bytes of a boundary tensor."""
    return math.prod(spec.shape) * dtype_bytes(spec.dtype)


def unit_costs(plan: Plan) -> Costs:
    """Return costs in `unit_durations`, with free communication and no memory."""
    num_chunks = Counter(chunk.rank for chunk in plan.chunks)
    return Costs(unit_durations({index: num_chunks[chunk.rank] for index, chunk in enumerate(plan.chunks)}))


def ring_time(num_bytes: float, num_ranks: int, bytes_per_time: float, latency: float = 0.0) -> float:
    """Return how long a ring all-reduce takes; zero for one rank.

        2 (n-1)/n * bytes / bandwidth + 2 (n-1) * latency          2 (n-1) steps, each with 1/n of the bytes

    Args: num_bytes: of the whole tensor. num_ranks: n. bytes_per_time: that one rank sends. latency: of one step.
    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009, section 4.
    """
    return 2 * half_ring_time(num_bytes, num_ranks, bytes_per_time, latency)


def half_ring_time(num_bytes: float, num_ranks: int, bytes_per_time: float, latency: float = 0.0) -> float:
    """Return how long a ring all-gather or reduce-scatter of a whole tensor takes: half of `ring_time`."""
    steps = num_ranks - 1
    return steps / num_ranks * num_bytes / bytes_per_time + steps * latency


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
    last: CausedSpan | None = None


class Links:
    """All channels of a plan.

    Args: plan: for peers and bytes. costs: for latency and bandwidth.
    """

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self._plan, self._costs = plan, costs
        self._tensors: dict[tuple[bool, int, int], _Tensor] = {}
        self._channels: dict[tuple[int, int], _Channel] = {}
        self._bytes: dict[tuple[bool, int], float] = {}

    def post(self, rank: int, transfer: Action, time: float, cause: CausedSpan | None) -> list[CausedSpan]:
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
        begun: list[CausedSpan] = []
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

    def _carry(self, channel: _Channel, tensor: _Tensor) -> tuple[CausedSpan, CausedSpan]:
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
        channel.last = CausedSpan(send.rank, Span(send.action, start, end), cause)
        return channel.last, CausedSpan(receive.rank, Span(receive.action, start, end), cause)

    def _num_bytes(self, send: Action) -> float:
        is_forward, chunk, _ = tensor_of(send)
        found = self._bytes.get((is_forward, chunk))
        if found is None:
            found = self._bytes[is_forward, chunk] = transfer_bytes(self._plan, send)
        return found
