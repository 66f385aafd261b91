"""A cost model of the step: durations and bytes for the simulator, from a configuration and a machine.

An action is the sum of its chunk's operators (chunk.py), each of which takes the time that the machine needs for it
(planner/machine), with exact mode's price, and with what a recorded run says of its kind. Use it to predict which
layout or schedule is faster before anything has run; costs that a run has measured predict its own machine better.
activations.py has the bytes. No torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from tpkernels.work import Work

from tpengine.architectures.part import Packed
from tpengine.architectures.registry import layers_are_alike
from tpengine.config import Config, num_shards_of
from tpengine.distributed.nccl_limits import buffer_bytes, processors_of_groups
from tpengine.dtypes import dtype_bytes
from tpengine.layout.decided import rows_memory_bytes
from tpengine.layout.groups import frozen_of
from tpengine.layout.parameters import kv_replicas
from tpengine.layout.slices import slice_numel
from tpengine.layout.state_bytes import num_trained, num_weights, state_bytes
from tpengine.layout.step_plan import Layout, counts_bytes, gradient_bytes, num_summed
from tpengine.layout.update_work import update_work
from tpengine.plan import Bucket, Chunk, CountBucket, Kind, Plan, Reduced, Weights
from tpengine.planner import ChunkBytes, Costs
from tpengine.planner.costs import Channels
from tpengine.planner.machine import CPU_CORE, Link, Machine
from tpengine.planner.modelled.activations import activation_bytes
from tpengine.planner.modelled.caches import prepared_bytes, prepares, touched_bytes
from tpengine.planner.modelled.chunk import ChunkActions
from tpengine.planner.modelled.operators import ActionSeconds, KnownSums, Operators


def action_seconds(
    config: Config,
    layout: Layout,
    plan: Plan,
    machine: Machine,
    packed: Packed | None = None,
    load: float = 1.0,
) -> dict[tuple[Kind, int], ActionSeconds]:
    """Return what F, B, I and W of each chunk take on one tp rank.

    Args:
        config: validated; sizes, dtype, whether exchanges are fused.
        layout: of that configuration: its tensor-parallel ranks, and how many ranks wait for each other.
        plan: its chunks, with what each recomputes and gathers again.
        machine: its rates; they are taken as the layout's ranks find them (`machine_of_ranks`).
        packed: the documents of micro-batches, where attention does not cross them; the mean counts.
        load: of the rank, as Sizes has it.
    """
    rates = machine_of_ranks(config, layout, plan, machine)
    sums: KnownSums = {}

    def of_chunk(chunk: Chunk, is_first: bool, is_last: bool) -> Mapping[Kind, ActionSeconds]:
        return _of_chunk(config, layout.tp, rates, chunk, is_first, is_last, sums, packed, load)

    return seconds_of_chunks(config, plan, of_chunk)


def seconds_of_chunks(
    config: Config, plan: Plan, of_chunk: Callable[[Chunk, bool, bool], Mapping[Kind, ActionSeconds]]
) -> dict[tuple[Kind, int], ActionSeconds]:
    """Return what the actions of each chunk take; chunks that are alike are asked for once.

    Args:
        config, plan: as for `action_seconds`.
        of_chunk: what F, B, I and W of a chunk take, which is the first one, or the last.
    """
    last = len(plan.chunks) - 1
    known: dict[object, Mapping[Kind, ActionSeconds]] = {}
    found: dict[tuple[Kind, int], ActionSeconds] = {}
    for index, chunk in enumerate(plan.chunks):
        # Chunks of equally many layers in the middle are alike, unless layers differ.
        is_alike = 0 < index < last and layers_are_alike(config.model) and not frozen_of(config)
        alike = (chunk.layers[1] - chunk.layers[0], chunk.recompute, chunk.gathered) if is_alike else index
        if alike not in known:
            known[alike] = of_chunk(chunk, index == 0, index == last)
        found |= {(kind, index): seconds for kind, seconds in known[alike].items()}
    return found


def machine_of_ranks(config: Config, layout: Layout, plan: Plan, machine: Machine) -> Machine:
    """Return the machine as a layout's ranks find it: they wait for the slowest chip, and touch so many bytes.

    Args:
        config, layout, plan, machine: as for `action_seconds`. A layout's replicas include context-parallel ranks.
    """
    machine = machine.slowest_of(layout.tp * layout.pp * layout.dp)
    return machine.touching(touched_bytes(config, layout, plan, machine)) if machine.cached else machine


def chunk_seconds(
    config: Config,
    tp: int,
    machine: Machine,
    chunk: Chunk,
    *,
    is_first: bool,
    is_last: bool,
    known: KnownSums | None = None,
    load: float = 1.0,
) -> Mapping[Kind, ActionSeconds]:
    """Return what F, B, I and W of one chunk take.

    Args:
        config, tp: as for `action_seconds`.
        machine: its rates, as `machine_of_ranks` has them.
        chunk: its layers.
        is_first, is_last: which ends of the model it holds.
        known: what chunks of this configuration, tp, machine and load have in common, to be kept from call to call.
        load: of the rank, as Sizes has it.
    """
    return _of_chunk(config, tp, machine, chunk, is_first, is_last, {} if known is None else known, load=load)


def _of_chunk(
    config: Config,
    tp: int,
    machine: Machine,
    chunk: Chunk,
    is_first: bool,
    is_last: bool,
    known: KnownSums,
    packed: Packed | None = None,
    load: float = 1.0,
) -> Mapping[Kind, ActionSeconds]:
    frozen = frozen_of(config)

    def with_shards(shards: int) -> Mapping[Kind, ActionSeconds]:
        operators = Operators(config, tp, machine, shards, packed, load)
        return ChunkActions(operators, config.model, chunk, is_first, is_last, known, frozen).by_kind()

    fast = with_shards(0)
    taken = fast
    # A tp that does not divide the shards is refused with the configuration; until then it has no price.
    if config.train.reduction == "exact" and num_shards_of(config) % tp == 0:
        exact = with_shards(num_shards_of(config) // tp)
        taken = {kind: replace(of, exact=exact[kind].total - of.total) for kind, of in fast.items()}
    # A recorded run knows better what each kind of action takes.
    return {kind: of * machine.recorded.get(kind, 1.0) for kind, of in taken.items()} if machine.recorded else taken


def model_costs(
    config: Config,
    layout: Layout,
    plan: Plan,
    machine: Machine = CPU_CORE,
    packed: Packed | None = None,
    load: float = 1.0,
) -> Costs:
    """Return the costs of a configuration's plan, in seconds and bytes.

    Args:
        config: validated.
        layout: of that configuration; dp enters the reductions and tp the exchanges inside each action, because the
            simulator plays one tp rank of one replica.
        plan: training_plan or forward_plan of both; includes what its chunks recompute and gather again.
        machine: its rates.
        packed: the documents of micro-batches, whose mean is modelled; None for whole sequences.
        load: of the rank that gets most, as Sizes has it: every step waits for it.
    """
    return StepCosts(config, layout, plan, machine, packed, load).costs()


class StepCosts:
    """The parts of `model_costs`; what is public is ours, and other where another engine is modelled by a subclass.

    Args:
        config, layout, plan, machine, packed, load: as for `model_costs`.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        plan: Plan,
        machine: Machine,
        packed: Packed | None = None,
        load: float = 1.0,
    ) -> None:
        self.config, self.layout, self.plan, self.machine = config, layout, plan, machine
        self.packed, self.load = packed, load
        self.dtype = config.train.dtype
        self.item, self.wide = dtype_bytes(self.dtype), gradient_bytes(self.dtype)
        # Bytes per element of a gradient on its way between replicas.
        self.reduced_item = self.wide

    def costs(self) -> Costs:
        """Return them all."""
        config, layout, plan, machine = self.config, self.layout, self.plan, self.machine
        per_rank = self.bytes_per_rank()
        numel = max(num for num, _ in per_rank)
        if frozen_of(config):
            numel = max(num_trained(config, layout, rank) for rank in range(layout.pp))
        sizes = {
            bucket.index: self._replicas(bucket)
            * slice_numel(layout.buckets[bucket.index].layout, self._replicas(bucket))
            for bucket in plan.buckets
        }
        # Experts that no other rank holds are never gathered, nor summed.
        shared = [bucket for bucket in plan.buckets if self._replicas(bucket) > 1 or layout.dp == 1]
        exchanging = self.communicator_bytes() + rows_memory_bytes(config, layout)
        return Costs(
            compute=self.compute_seconds(),
            latency=machine.within.latency_s,
            bytes_per_time=self._of_group(machine.within, "pp").bytes_per_s,
            links=_links_between_nodes(layout, plan, machine, self._of_group(machine.between, "pp")),
            channels=self.channels,
            reductions={b.index: self.reduction_seconds(b) for b in plan.buckets if b.reduced is not Reduced.NEVER}
            | {counts.index: self._counts_seconds(counts) for counts in plan.counts},
            gathers={
                bucket.index: self._gather_seconds(bucket, sizes[bucket.index] * self.item)
                for bucket in shared
                if bucket.weights is not Weights.WHOLE
            },
            reduce_share=machine.reduce_share,
            ties=self._tie_seconds(),
            clip=self._clip_seconds(numel),
            step=self._step_seconds(numel),
            activations=self.activation_bytes(),
            resident=tuple(
                float(held + prepared_bytes(config, layout, rank, machine) + exchanging)
                for rank, (_, held) in enumerate(per_rank)
            ),
            weights={b.index: float(sizes[b.index] * self.item) for b in shared if b.weights is Weights.SLICED},
            contributions={
                b.index: float(sizes[b.index] * self.reduced_item) for b in shared if b.reduced is Reduced.MICROBATCH
            },
        )

    def compute_seconds(self) -> dict[tuple[Kind, int], float]:
        """Return what F, B, I and W of each chunk take."""
        seconds = action_seconds(self.config, self.layout, self.plan, self.machine, self.packed, self.load)
        return {key: of.total for key, of in seconds.items()}

    @property
    def channels(self) -> Channels:
        """Return which messages run one after another."""
        return self.machine.channels

    def activation_bytes(self) -> dict[int, ChunkBytes]:
        """Return what a micro-batch holds, by chunk."""
        return activation_bytes(self.config, self.layout.tp, self.plan, self.load)

    def bytes_per_rank(self) -> list[tuple[int, int]]:
        """Return (weights, bytes) by pipeline rank, as the function of that name."""
        return bytes_per_rank(self.config, self.layout)

    def group_processors(self) -> Mapping[str, int]:
        """Return how many processors NCCL may take for a group; none are named where it takes what it wants."""
        layout, machine = self.layout, self.machine
        across = not machine.fits_a_node(layout.dp, layout.tp)
        return processors_of_groups(layout, kv_replicas(self.config.model, layout.tp), spans_hosts=across)

    def communicator_bytes(self) -> int:
        """Return what communicators hold, an estimate."""
        return communicator_bytes(self.config, self.layout, self.machine)

    def _of_group(self, link: Link, group: str) -> Link:
        """Return a link as a group finds it, with the processors that it may take."""
        return self.machine.by_processors(link, self.group_processors().get(group, 0))

    def reduction_seconds(self, bucket: Bucket) -> float:
        """Return how long replicas sum a bucket's gradients: each its slice with ZeRO, else the whole."""
        of = self.layout.buckets[bucket.index].layout
        if self.layout.zero:
            return self._link(bucket).gather_seconds(of.numel * self.reduced_item, self._replicas(bucket))
        return self.whole_reduction_seconds(bucket)

    def _counts_seconds(self, counts: CountBucket) -> float:
        """Return how long a stage's ranks sum what they have counted: tp ranks that route their own, then replicas."""
        layout, num_bytes = self.layout, counts_bytes(self.config, self.layout)
        firsts = _firsts(layout, self.plan.chunks[counts.chunks[0]].rank)
        seconds = self.machine.link(layout.dp, layout.tp, firsts).all_reduce_seconds(num_bytes, layout.dp)
        if layout.ep > 1:
            seconds += self.machine.link(layout.tp, 1, firsts[:1]).all_reduce_seconds(num_bytes, layout.tp)
        return seconds

    def _replicas(self, bucket: Bucket) -> int:
        """Return how many ranks hold what a bucket is of."""
        return self.layout.num_replicas(self.layout.buckets[bucket.index].layout)

    def _link(self, bucket: Bucket) -> Link:
        """Return what connects these ranks: tp ranks apart, or as many as share out experts."""
        layout, replicas = self.layout, self._replicas(bucket)
        stride = layout.tp * layout.dp // replicas
        first = _firsts(layout, _stage_of(bucket, self.plan)).start
        link = self.machine.link(replicas, stride, range(first, first + stride))
        return self._of_group(link, "dp" if stride == layout.tp else "edp")

    def whole_reduction_seconds(self, bucket: Bucket) -> float:
        """Return how long ranks sum a bucket's gradients whole."""
        layout, of = self.layout, self.layout.buckets[bucket.index].layout
        num_ranks = num_summed(layout, of, self.config.model)
        # Ranks that hold the same weight whole are next to each other.
        beside = self.machine.link(num_ranks, 1, _firsts(layout, _stage_of(bucket, self.plan))[:1])
        link = self._link(bucket) if num_ranks == self._replicas(bucket) else self._of_group(beside, "dp_tp")
        return link.all_reduce_seconds(of.numel * self.reduced_item, num_ranks)

    def _gather_seconds(self, bucket: Bucket, num_bytes: float) -> float:
        """Return how long a bucket's weights are gathered: exchanged, and copied by those who gather.

        On a CPU a slice that is a tensor of its own is read twice: for the other replicas, and into the buffer, where a
        slice of fast mode's weights that stay lies already (tpkernels/exchange/background.py). Exact mode gathers
        blocks of rows in another order, and then puts them into their places (data_parallel/bucket.py).
        """
        replicas, is_exact = self._replicas(bucket), self.config.train.reduction == "exact"
        has_slices_apart = is_exact or bucket.weights is Weights.SLICED
        copied = num_bytes / replicas * (has_slices_apart and not self.machine.is_asynchronous) + num_bytes * is_exact
        seconds = self._link(bucket).gather_seconds(num_bytes, replicas)
        # Read and written.
        return seconds + (self._other_seconds(int(2 * copied)) if copied else 0.0)

    def _tie_seconds(self) -> float:
        """Return how long the two ends of a pipeline sum the gradients of a tied embedding, forth and back."""
        config, layout = self.config, self.layout
        table_bytes = config.model.padded_vocab_size(layout.tp) // layout.tp * config.model.hidden_size * self.wide
        ends = self.machine.link(2, (layout.pp - 1) * layout.dp * layout.tp, range(layout.dp * layout.tp))
        return 2 * ends.exchange_seconds(table_bytes, 2)

    def _clip_seconds(self, numel: int) -> float:
        """Return what clipping takes: each gradient is read once; then one number is reduced and broadcast."""
        world = self.layout.pp * self.layout.dp * self.layout.tp
        agreed = 2 * math.ceil(math.log2(world)) * self.machine.link(world, 1).latency_s
        return self._update_share * (self._other_seconds(self._num_updated(numel) * self.wide) + agreed)

    def _step_seconds(self, numel: int) -> float:
        """Return what the optimizer takes, with what a step does once besides."""
        work, operator = update_work(self.config.optim, self.dtype, self._num_updated(numel))
        update = self.machine.other_seconds(work, self.dtype, operator)
        return self._update_share * (update + self._once_per_step(numel))

    def _once_per_step(self, numel: int) -> float:
        """Return what a step does before its plan, where it was measured: zero gradients, prepare weights."""
        if self.dtype not in self.machine.measured:
            return 0.0
        seconds = self._other_seconds(numel * self.wide, "zero")
        if prepares(self.config, self.machine):
            # Both forms of every matrix: read and written.
            seconds += self._other_seconds(4 * numel * self.item, "prepare")
        return seconds

    def _num_updated(self, numel: int) -> int:
        """Return of how many weights each replica's optimizer updates its share."""
        layout = self.layout
        if not layout.zero:
            return numel
        if layout.ep <= layout.tp:
            return -(-numel // layout.dp)
        # Experts on more ranks than tp have fewer replicas.
        return max(
            sum(-(-bucket.numel // layout.num_replicas(bucket)) for bucket in layout.buckets_of(rank).values())
            for rank in range(layout.pp)
        )

    @property
    def _update_share(self) -> float:
        """What a recorded run took for its updates, over what the rates say."""
        return self.machine.recorded.get(Kind.STEP, 1.0)

    def _other_seconds(self, num_bytes: int, name: str = "") -> float:
        return self.machine.other_seconds(Work(memory_bytes=num_bytes), self.dtype, name)


def communicator_bytes(config: Config, layout: Layout, machine: Machine) -> int:
    """Return an estimate of the buffers of a rank's communicators on GPUs (distributed/nccl_limits.py)."""
    if not machine.nccl_bytes_per_s_per_processor:
        return 0
    ends = config.model.tie_embeddings and layout.ranks[0] != layout.ranks[-1]
    across = not machine.fits_a_node(layout.dp, layout.tp)
    return buffer_bytes(layout, kv_replicas(config.model, layout.tp), ends=ends, spans_hosts=across)


def _links_between_nodes(
    layout: Layout, plan: Plan, machine: Machine, link: Link
) -> Mapping[tuple[int, int], tuple[float, float]]:
    """Return the links of neighbouring stages that lie on several nodes, of any replica: each step waits for all."""
    between = link.latency_s, link.bytes_per_s
    holders = [chunk.rank for chunk in plan.chunks]
    pairs = {pair for one, other in itertools.pairwise(holders) for pair in ((one, other), (other, one))}
    return {pair: between for pair in pairs if pair[0] != pair[1] and crosses_nodes(layout, machine, *pair)}


def crosses_nodes(layout: Layout, machine: Machine, one: int, other: int) -> bool:
    """Return whether a replica's two stages lie on different nodes: ranks are numbered by stage, replica, tp rank."""
    stride, per_node = layout.dp * layout.tp, machine.ranks_per_node
    starts = one * stride, other * stride
    return any((starts[0] + place) // per_node != (starts[1] + place) // per_node for place in range(stride))


def bytes_per_rank(config: Config, layout: Layout) -> list[tuple[int, int]]:
    """Return (weights, bytes) by pipeline rank: elements that it computes with; what its state takes between steps."""
    return [(num_weights(config, layout, rank), state_bytes(config, layout, rank).total) for rank in range(layout.pp)]


def _stage_of(bucket: Bucket, plan: Plan) -> int:
    return plan.chunks[bucket.chunks[0]].rank


def _firsts(layout: Layout, stage: int) -> range:
    """Return the first ranks of a stage's groups of replicas: those of its tp ranks."""
    first = stage * layout.dp * layout.tp
    return range(first, first + layout.tp)
