"""Costs: how long each action takes and how many bytes it holds, for the simulator.

    unit_costs(plan)     a forward of all layers of a rank takes 1, its backward 2, its halves 1 each; links are free
    costs from a model   modelled/costs.py: flops and bytes over the rates of a machine
    measured costs       profiles/: what a run has measured, kept as JSON

The simulator plays one data-parallel replica of a pipeline and one tensor-parallel rank per stage, because the others
do the same at the same time. How many there are only changes the durations. With 625 replicas a bucket's entry in
`reductions` is `ring_time(bytes, 625, ...)`, that in `gathers` half as much; a stage's durations are those of one of
its tp ranks, including its exchanges. So 10,000 ranks cost no more to simulate than 16.

`Costs.channels` says which transfers wait for each other; links.py is what follows from it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tpengine.dtypes import dtype_bytes
from tpengine.plan.actions import COMPUTE, SENDS, TRANSFERS, Action, Kind, peer_chunk
from tpengine.plan.clock import unit_durations
from tpengine.plan.plan import Plan, TensorSpec


class Channels(StrEnum):
    """Which transfers of a pipeline's ranks run one after another; the value is its text."""

    # Those from one rank to another: shared memory, gloo, and NCCL with a communicator for each ordered pair.
    PAIR = "pair"
    # All activations of a rank, and all its gradients, sent or received: NCCL, a communicator for each direction.
    DIRECTION = "direction"
    # All of a rank: NCCL with one communicator for a pipeline.
    ONE = "one"


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
        channels: which transfers wait for each other.
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
    channels: Channels = Channels.PAIR
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
