"""From a configuration to plans: which layers each stage holds, its gradient buckets, and the verified step.

Torch-free, so that every rank can build the plan of all ranks and compare its digest, and so that a plan can be
looked at on a machine without torch. The generic machinery (actions, schedules, lowering, verification) is in
plan/; here is only what a transformer of this configuration puts into it.
The phases of a run have one layout as far as the same model and gradient buffers serve them all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tpengine.architectures.part import Axis
from tpengine.architectures.registry import architecture_of
from tpengine.config import Config, ModelConfig, Phase, Phases, num_evaluated, num_shards_of, schedule_of
from tpengine.config.rules import ZERO_OF_SLICED_GRADIENTS, ZERO_OF_SLICED_WEIGHTS
from tpengine.dtypes import dtype_bytes
from tpengine.layout.flops import layer_flops
from tpengine.layout.groups import check_groups, frozen_of
from tpengine.layout.parameters import (
    EMBEDDING,
    HEAD_USE,
    BucketLayout,
    Gradient,
    bucket_layouts,
    embedding_spec,
    exact_gradients,
    gradients_of,
    kv_replicas,
    layers_of_experts,
    leaf_parts,
    sliced_gradients,
    stage_specs,
)
from tpengine.plan import (
    Bucket,
    Chunk,
    CountBucket,
    Gathered,
    Plan,
    Recompute,
    Reduced,
    Residency,
    TensorSpec,
    Tie,
    Weights,
    forward_only,
    lower,
    partition_layers,
    slack,
    verify,
)
from tpengine.plan.clock import whole_unit_durations


@dataclass(frozen=True)
class PlacedBucket:
    """A gradient bucket and the chunks whose backwards fill it: one, or both ends of a model with tied embeddings.

    Where replicas own slices of weights, frozen weights have buckets too, which nothing fills.
    """

    chunks: tuple[int, ...]
    layout: BucketLayout
    is_frozen: bool = False


@dataclass(frozen=True)
class Layout:
    """One rank-independent description of a resolved configuration: sizes of the axes, chunks, layers and buckets.

    Attributes:
        pp, dp, tp: sizes of the axes.
        ranks: the pipeline rank of each chunk of the model, in model order.
        layers: half-open layer range of each chunk.
        buckets: by index, unique over all ranks; a chunk's in the order in which backward completes them.
        zero: the stage of ZeRO: what replicas own slices of.
        residency: how long gathered weights stay.
        first_trained: the first chunk with weights that are trained: those before have no backward.
        ep: how many ranks of a stage share experts.
        row_load: for how many times the mean a rank's experts have buffers that kernels bring rows to; 0 for none: rows
            travel at their exact number.
    """

    pp: int
    dp: int
    tp: int
    ranks: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]
    buckets: Mapping[int, PlacedBucket]
    zero: int = 0
    residency: Residency = Residency.STEP
    first_trained: int = 0
    ep: int = 1
    row_load: float = 0.0

    def num_replicas(self, bucket: BucketLayout) -> int:
        """How many ranks hold what a bucket is of, those of other tp ranks not counted; ZeRO cuts it over them."""
        return self.replicas_over(bucket.reduce_over)

    def replicas_over(self, axes: Sequence[Axis]) -> int:
        """How many ranks the first of a gradient's axes joins: replicas, or those that hold the same experts."""
        return self.dp * self.tp // self.ep if axes[:1] == ("edp",) else self.dp

    def num_lanes(self, bucket: BucketLayout) -> int:
        """How many replicas' gradients a rank adds up apart in exact mode: those whose tokens its experts get."""
        return max(1, self.ep // self.tp) if bucket.reduce_over[:1] == ("edp",) else 1

    def replica_of(self, bucket: BucketLayout, dp_index: int) -> int:
        """Which of those the ranks of a replica are."""
        return dp_index * self.num_replicas(bucket) // self.dp

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The chunks of a pipeline rank, in model order."""
        return tuple(chunk for chunk, holder in enumerate(self.ranks) if holder == rank)

    def layers_of(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Half-open layer ranges of a pipeline rank's chunks, in model order."""
        return tuple(self.layers[chunk] for chunk in self.chunks_of(rank))

    def buckets_of(self, rank: int) -> dict[int, BucketLayout]:
        """The gradient buckets of a pipeline rank, by index."""
        return self._buckets_of(rank, is_frozen=False)

    def frozen_buckets_of(self, rank: int) -> dict[int, BucketLayout]:
        """The buckets of a pipeline rank's frozen weights, by index, where replicas own slices of them."""
        return self._buckets_of(rank, is_frozen=True)

    def _buckets_of(self, rank: int, *, is_frozen: bool) -> dict[int, BucketLayout]:
        return {
            index: bucket.layout
            for index, bucket in self.buckets.items()
            if self.ranks[bucket.chunks[0]] == rank and bucket.is_frozen == is_frozen
        }

    @property
    def ends_share_a_rank(self) -> bool:
        """Whether one rank holds the model's first chunk and its last."""
        return self.ranks[0] == self.ranks[-1]


def gradient_bytes(dtype: str) -> int:
    """Bytes of an element of a gradient: promote_types(dtype, float32)."""
    return max(4, dtype_bytes(dtype))


# The planner asks for the same cut thousands of times, and a cut of 80 layers takes a tenth of a second.
@functools.lru_cache(maxsize=4096)
def layer_ranges(
    model: ModelConfig, seq: int, ranks: tuple[int, ...], recompute: Recompute = Recompute.NONE
) -> tuple[tuple[int, int], ...]:
    """Split the layers over chunks, so that their ranks are balanced by the flops of a sequence, forward and backward.

    Embedding and head count, and what backward computes again.

    Args:
        ranks: the pipeline rank of each chunk.
    """
    # Backward costs two forwards, and what it computes again.
    ends, ends_passes = architecture_of(model).ends(model), 4 if recompute is Recompute.FULL else 3
    costs = []
    for layer in range(model.num_layers):
        forward, attention = layer_flops(model, layer, seq)
        again = {Recompute.NONE: 0, Recompute.ATTENTION: attention}.get(recompute, forward)
        costs.append(3 * forward + again)
    return partition_layers(
        costs,
        first_cost=ends_passes * ends.lookup_flops(model, seq),
        last_cost=ends_passes * ends.head_flops(model, seq),
        ranks=ranks,
    )


def layout_of(
    config: Config,
    residency: Residency | None = None,
    balanced_for: int = 0,
    packs_gradients: bool | None = None,
    row_load: float = 0.0,
) -> Layout:
    """Describe a validated configuration (config.validate): who holds which layers and buckets.

    Args:
        residency: what was decided where the configuration leaves it open (`residency auto`); default STEP there.
        balanced_for: the sequence length that layers are balanced for; 0 for the configuration's.
        packs_gradients: gradients of weights that one matmul reads lie behind each other, and one product adds to all
            of them; default where the configuration says `device cuda`. Never in exact mode: a product's bits depend on
            its size. For the same reason not on a CPU, where it would save nothing.
        row_load: as Layout has it.

    Raises:
        ValueError: as check_groups.
    """
    parallel, model = config.parallel, config.model
    assert parallel.pp and parallel.dp and parallel.tp, "resolve the layout first: config.validate"
    check_groups(config)
    schedule = schedule_of(config)
    layers = layer_ranges(model, balanced_for or config.train.seq_len, schedule.ranks, Recompute(parallel.recompute))
    packed = config.train.reduction == "fast" and (
        config.device == "cuda" if packs_gradients is None else packs_gradients
    )
    gradients = chunk_gradients(config, schedule.ranks, layers, packed=packed)
    first_trained = min(min(chunks) for chunks, of_chunks in gradients.items() if of_chunks)
    item = gradient_bytes(config.train.dtype)
    placed: list[PlacedBucket] = []
    for chunk, ends_after in enumerate(slack(schedule, whole_unit_durations(schedule.ranks), first_trained)):
        # Nothing hides what is reduced after the step's last backward: there the last bucket is to be a small one.
        layouts = bucket_layouts(
            gradients[chunk,],
            parallel.bucket_bytes,
            item,
            tapered=ends_after == 0,
            in_order_of_use=parallel.zero_in_effect > 0,
            packed=packed,
        )
        placed += [PlacedBucket((chunk,), layout) for layout in layouts]
    for chunks in gradients:
        if len(chunks) > 1:
            placed += [PlacedBucket(chunks, layout) for layout in bucket_layouts(gradients[chunks], 1, item)]
    for chunks, weights in frozen_weights(config, schedule.ranks, layers).items():
        layouts = bucket_layouts(weights, parallel.bucket_bytes, item, in_order_of_use=True)
        placed += [PlacedBucket(chunks, layout, is_frozen=True) for layout in layouts]
    is_open = parallel.residency == "auto" or parallel.zero_in_effect != ZERO_OF_SLICED_WEIGHTS
    asked = Residency.STEP if is_open else Residency(parallel.residency)
    return Layout(
        parallel.pp,
        parallel.dp,
        parallel.tp,
        schedule.ranks,
        layers,
        dict(enumerate(placed)),
        parallel.zero_in_effect,
        residency or asked,
        first_trained,
        parallel.ep,
        row_load,
    )


def frozen_weights(
    config: Config, ranks: Sequence[int], layers: Sequence[tuple[int, int]]
) -> dict[tuple[int, ...], tuple[Gradient, ...]]:
    """The frozen weights that replicas own slices of, by the chunks that use them, as buffers that nothing adds to.

    Below stage 3 of ZeRO every replica has frozen weights whole, and nobody gathers them.
    """
    frozen = frozen_of(config)
    if not frozen or config.parallel.zero_in_effect != ZERO_OF_SLICED_WEIGHTS:
        return {}
    # What has no gradient at all is small, and stays whole.
    num, model = config.model.num_layers, config.model
    sliced = {spec.name for spec in stage_specs(model, 1, 0, num) if spec.has_gradient and spec.name in frozen}
    if not sliced:
        return {}
    return {
        # A weight has one place, also where an output head reads it too.
        chunks: tuple(
            replace(weight, reduce_over=weight.reduce_over[:1])
            for weight in weights
            if not weight.name.endswith(HEAD_USE)
        )
        for chunks, weights in _buffers(config, ranks, layers, sliced.__contains__).items()
    }


def chunk_gradients(
    config: Config, ranks: Sequence[int], layers: Sequence[tuple[int, int]], *, packed: bool = False
) -> dict[tuple[int, ...], tuple[Gradient, ...]]:
    """The gradient buffers of what is trained, by the chunks whose backwards add to them.

    Args:
        ranks, layers: pipeline rank and layer range of each chunk.
        packed: as gradients_of.

    Returns:
        One entry per chunk; and, where one rank holds both ends of a model with tied embeddings as two chunks, and adds
        both uses to one buffer, an entry of both for that buffer.
    """
    frozen = frozen_of(config)
    return _buffers(config, ranks, layers, lambda name: name not in frozen, packed=packed)


def _buffers(
    config: Config,
    ranks: Sequence[int],
    layers: Sequence[tuple[int, int]],
    takes: Callable[[str], bool],
    *,
    packed: bool = False,
) -> dict[tuple[int, ...], tuple[Gradient, ...]]:
    """See chunk_gradients: the buffers of those parameters whose names `takes` takes."""
    model, tp, exact = config.model, config.parallel.tp, config.train.reduction == "exact"
    assert tp, "resolve the layout first: config.validate"
    table_size = num_shards_of(config) if exact else tp
    last = len(ranks) - 1
    shares_ends = model.tie_embeddings and last > 0 and ranks[0] == ranks[last]
    found: dict[tuple[int, ...], tuple[Gradient, ...]] = {}
    for chunk, (begin, end) in enumerate(layers):
        everyone = stage_specs(model, table_size, begin, end, config.parallel.ep, in_chunks=exact)
        specs = tuple(spec for spec in everyone if takes(spec.name))
        if exact:
            # Each use of tied embeddings on one rank has buffers of its own, filled by the chunk that uses it.
            uses = (False, True) if model.tie_embeddings and last == 0 else (shares_ends and chunk == last,)
            sliced = config.parallel.zero_in_effect > 0
            found[chunk,] = exact_gradients(specs, table_size, table_size // tp, uses, sliced=sliced)
            continue
        if shares_ends:
            specs = tuple(spec for spec in specs if spec.name != EMBEDDING)
        # The slices of a table that two ranks hold are summed between them, and so must be the same elements.
        shared = {EMBEDDING} if model.tie_embeddings and last > 0 else ()
        found[chunk,] = (
            sliced_gradients(specs, tp, shared)
            if config.parallel.zero_in_effect
            else gradients_of(specs, tp, packed=packed)
        )
    if shares_ends and not exact and takes(EMBEDDING):
        found[0, last] = gradients_of([embedding_spec(model, tp)], tp)
    return found


def num_summed(layout: Layout, bucket: BucketLayout, model: ModelConfig) -> int:
    """How many ranks a bucket is summed over."""
    sizes: dict[Axis, int] = {"tp": layout.tp, "replica": kv_replicas(model, layout.tp)}
    return layout.num_replicas(bucket) * math.prod(sizes[axis] for axis in bucket.reduce_over[1:])


def training_plan(config: Config, layout: Layout) -> Plan:
    """Build and verify the plan of one training step.

    Args:
        config: validated configuration.
        layout: of that configuration.

    Returns:
        A plan that has passed `verify`: micro-batches of one replica, bucket reductions for every bucket with more
        than one holder, the tied embeddings' sum where the ends are on two ranks, clip and step.
    """
    plan = lowered(config, layout)
    verify(plan)
    return plan


def lowered(config: Config, layout: Layout) -> Plan:
    """Build the plan of one training step, as `training_plan`, but do not verify it: for a planner's trials."""
    buckets = _buckets(config, layout)
    is_tied = config.model.tie_embeddings and EMBEDDING not in frozen_of(config)
    tied = is_tied and not layout.ends_share_a_rank
    return lower(
        schedule_of(config),
        _chunks(config, layout, config.train.micro_batch_size),
        buckets,
        (Tie(0, (0, len(layout.ranks) - 1)),) if tied else (),
        num_microbatches=config.train.num_micro_batches,
        num_layers=config.model.num_layers,
        training=True,
        residency=layout.residency,
        counts=_counts(config, layout),
    )


def _counts(config: Config, layout: Layout) -> tuple[CountBucket, ...]:
    """What routers count, by stage: where several ranks each route some of a step's tokens, they sum it."""
    if num_counting(layout) == 1:
        return ()
    found: list[CountBucket] = []
    with_experts = layers_of_experts(config.model)
    for stage in range(layout.pp):
        held = {at: range(*layout.layers[at]) for at in layout.chunks_of(stage)}
        chunks = tuple(at for at, layers in held.items() if any(layer in layers for layer in with_experts))
        if chunks:
            found.append(CountBucket(len(layout.buckets) + len(found), chunks))
    return tuple(found)


def num_counting(layout: Layout) -> int:
    """How many ranks of a stage route tokens of their own: its replicas; where ranks share experts, tp ranks too."""
    return layout.dp * (layout.tp if layout.ep > 1 else 1)


def counts_bytes(config: Config, layout: Layout) -> int:
    """Bytes of what a stage counts, in int64: of each layer tokens of every expert, crossing rows, auxiliary losses.

    And one number for all: rows that had no room.
    """
    num_micro_batches = config.train.num_micro_batches * layout.dp
    per_layer = config.model.details.num_experts + 1 + num_micro_batches
    return 8 * (len(layers_of_experts(config.model)) * per_layer + 1)


def evaluation_micro_batches(config: Config) -> int:
    """How many micro-batches each replica runs for the held-out loss: equally many, so that they may be more in all."""
    assert config.parallel.dp, "resolve the layout first: config.validate"
    in_all = -(-num_evaluated(config.train) // config.train.micro_batch_size)
    return -(-in_all // config.parallel.dp)


def forward_plan(config: Config, layout: Layout, num_microbatches: int, micro_batch_size: int) -> Plan:
    """Build and verify a forward-only plan (held-out loss, sampling) of the given micro-batches."""
    plan = lower(
        forward_only(layout.ranks, num_microbatches),
        _chunks(config, layout, micro_batch_size),
        _buckets(config, layout) if layout.zero else (),
        (),
        num_microbatches=num_microbatches,
        num_layers=config.model.num_layers,
        training=False,
        residency=layout.residency,
    )
    verify(plan)
    return plan


def weights_of(config: Config, layout: Layout, index: int) -> Weights:
    """Return what every replica holds of a bucket's weights.

    Frozen ones have buckets only where they are sliced. In exact mode each use of a tied embedding has gradients of its
    own. Where one rank makes both uses, as two chunks, the table belongs to the bucket of the lookup and stays whole,
    since the other chunk's plan does not gather it.
    """
    bucket = layout.buckets[index]
    if config.train.reduction == "exact" and layout.zero:
        uses = [leaf_parts(name) for name in bucket.layout.names]
        if all(is_head for _, _, is_head in uses):
            return Weights.WHOLE
        both = config.model.tie_embeddings and layout.ends_share_a_rank and len(layout.ranks) > 1
        if both and uses[0][0] == EMBEDDING:
            return Weights.UPDATED
    return {0: Weights.WHOLE, 3: Weights.SLICED}.get(layout.zero, Weights.UPDATED)


def reduced_of(config: Config) -> Reduced:
    """Return when a bucket's gradient is summed: at stages 2 and 3 for every micro-batch.

    Exact mode adds blocks of micro-batches on each replica, in a tree, before it sums over replicas.
    """
    each = config.parallel.zero_in_effect >= ZERO_OF_SLICED_GRADIENTS and config.train.reduction == "fast"
    return Reduced.MICROBATCH if each else Reduced.STEP


def _buckets(config: Config, layout: Layout) -> tuple[Bucket, ...]:
    return tuple(
        Bucket(
            index,
            bucket.chunks,
            weights_of(config, layout, index),
            Reduced.NEVER if bucket.is_frozen else reduced_of(config),
        )
        for index, bucket in layout.buckets.items()
        if num_summed(layout, bucket.layout, config.model) > 1
    )


def _chunks(config: Config, layout: Layout, micro_batch_size: int) -> tuple[Chunk, ...]:
    tokens = micro_batch_size * config.train.seq_len
    boundary = TensorSpec((tokens // layout.tp, config.model.hidden_size), config.train.dtype)
    last = len(layout.ranks) - 1
    return tuple(
        Chunk(
            rank,
            layers,
            input=None if chunk == 0 else boundary,
            output=None if chunk == last else boundary,
            recompute=Recompute(config.parallel.recompute),
            gathered=Gathered(config.parallel.gathered),
            has_backward=chunk >= layout.first_trained,
        )
        for chunk, (rank, layers) in enumerate(zip(layout.ranks, layout.layers, strict=True))
    )


def phase_layouts(
    phases: Phases, residency: Residency | None = None, packs_gradients: bool | None = None, row_load: float = 0.0
) -> tuple[Layout, ...]:
    """Return the layout of each phase.

    Layers are split for the sequences of the phase with the most tokens, so that each rank keeps its layers. Phases
    that freeze other weights, or in exact mode cut the model into another number of shards, have other buckets.

    Args:
        phases: of the run.
        residency, packs_gradients, row_load: as layout_of.

    Raises:
        ValueError: as check_phases.
    """
    check_phases(phases)
    longest = longest_of(phases)
    found: dict[object, Layout] = {}
    for phase in (longest, *phases):
        if cut_of(phase.config) not in found:
            found[cut_of(phase.config)] = layout_of(
                phase.config, residency, longest.config.train.seq_len, packs_gradients, row_load
            )
    return tuple(found[cut_of(phase.config)] for phase in phases)


def check_phases(phases: Phases) -> None:
    """Check the groups of parameters of every phase.

    Raises:
        ValueError: as check_groups, under the phase's number where there are several.
    """
    for phase in phases:
        try:
            check_groups(phase.config)
        except ValueError as error:
            where = f"{phase.config.phases}: in phase {phase.number + 1} " if len(phases) > 1 else ""
            raise ValueError(f"{where}{error}") from None


def longest_of(phases: Phases) -> Phase:
    """Return the phase with the most tokens: layers are split for its sequences."""
    return max(phases, key=lambda phase: (phase.end_step - phase.first_step) * phase.tokens_per_step)


def cut_of(config: Config) -> tuple[int, frozenset[str]]:
    """Return what phases with one model and its buffers have alike: exact mode's number of shards; what is frozen."""
    return num_shards_of(config) if config.train.reduction == "exact" else 1, frozen_of(config)
