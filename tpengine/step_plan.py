"""From a configuration to plans: which layers each stage holds, its gradient buckets, and the verified step.

Torch-free, so that every rank can build the plan of all ranks and compare its digest, and so that a plan can be
looked at on a machine without torch. The generic machinery (actions, schedules, lowering, verification) is in
plan/; here is only what a transformer of this configuration puts into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tpkernels.work import attention_work, matmul_work

from tpengine.config import Config, ModelConfig, virtual_tp_of
from tpengine.parameters import (
    BucketLayout,
    Gradient,
    bucket_layouts,
    exact_gradients,
    gradients_of,
    kv_replicas,
    layer_specs,
    stage_specs,
)
from tpengine.plan import (
    SCHEDULES,
    Bucket,
    Chunk,
    Plan,
    TensorSpec,
    Tie,
    forward_only,
    lower,
    partition_layers,
    verify,
)

_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}

# A lookup moves D elements a token; counted as this many flops an element it still never outweighs a layer.
_EMBEDDING_FLOPS_PER_ELEMENT = 2


@dataclass(frozen=True)
class Layout:
    """One rank-independent description of a resolved configuration: sizes of the axes, layers and buckets.

    Attributes:
        pp, dp, tp: sizes of the axes.
        layers: half-open layer range of each stage.
        buckets: for each stage, bucket index -> layout, in the order in which backward completes them. Indices are
            unique over all stages.
    """

    pp: int
    dp: int
    tp: int
    layers: tuple[tuple[int, int], ...]
    buckets: tuple[Mapping[int, BucketLayout], ...]


def dtype_bytes(dtype: str) -> int:
    """Bytes of an element of a parameter or activation."""
    return _DTYPE_BYTES[dtype]


def gradient_bytes(dtype: str) -> int:
    """Bytes of an element of a gradient: promote_types(dtype, float32)."""
    return max(4, dtype_bytes(dtype))


def layer_ranges(model: ModelConfig, seq: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Split the layers over stages, balanced by forward flops of a sequence; embedding and head count."""
    d, item = model.hidden_size, 1
    matrices = sum(
        matmul_work(seq, spec.shape[0], spec.shape[1], item).flops for spec in layer_specs(model, 1, 0) if spec.decays
    )
    attention = attention_work(
        1, seq, model.num_heads, model.num_kv_heads, model.head_size, item, causal_half=True
    ).flops
    return partition_layers(
        [matrices + attention] * model.num_layers,
        first_cost=_EMBEDDING_FLOPS_PER_ELEMENT * seq * d,
        last_cost=matmul_work(seq, model.vocab_size, d, item).flops,
        num_stages=num_stages,
    )


def layout_of(config: Config) -> Layout:
    """Describe a validated configuration (config.validate): who holds which layers and buckets."""
    parallel, model = config.parallel, config.model
    assert parallel.pp and parallel.dp and parallel.tp, "resolve the layout first: config.validate"
    layers = layer_ranges(model, config.train.seq_len, parallel.pp)
    buckets: list[Mapping[int, BucketLayout]] = []
    next_index = 0
    for first, last in layers:
        gradients = stage_gradients(config, first, last)
        layouts = bucket_layouts(gradients, parallel.bucket_bytes, gradient_bytes(config.train.dtype))
        buckets.append(dict(enumerate(layouts, start=next_index)))
        next_index += len(layouts)
    return Layout(parallel.pp, parallel.dp, parallel.tp, layers, tuple(buckets))


def stage_gradients(config: Config, first: int, last: int) -> tuple[Gradient, ...]:
    """The gradient buffers of a rank whose stage holds layers [first, last)."""
    model, tp = config.model, config.parallel.tp
    assert tp, "resolve the layout first: config.validate"
    if config.train.reduction == "fast":
        return gradients_of(stage_specs(model, tp, first, last), tp)
    virtual = virtual_tp_of(config)
    tied_ends = model.tie_embeddings and (first, last) == (0, model.num_layers)
    return exact_gradients(stage_specs(model, virtual, first, last), virtual, virtual // tp, tied_ends)


def num_summed(layout: Layout, bucket: BucketLayout, model: ModelConfig) -> int:
    """How many ranks a bucket is summed over."""
    return (
        layout.dp
        * {
            "dp": 1,
            "dp_tp": layout.tp,
            "dp_replica": kv_replicas(model, layout.tp),
        }[bucket.reduce_over]
    )


def training_plan(config: Config, layout: Layout) -> Plan:
    """Build and verify the plan of one training step.

    Args:
        config: validated configuration.
        layout: of that configuration.

    Returns:
        A plan that has passed `verify`: micro-batches of one replica, bucket reductions for every bucket with more
        than one holder, the tied embeddings' sum, clip and step.
    """
    num = config.train.num_micro_batches
    compute = SCHEDULES[config.parallel.schedule](layout.pp, num)
    buckets = tuple(
        Bucket(index, chunk)
        for chunk, held in enumerate(layout.buckets)
        for index, bucket in held.items()
        if num_summed(layout, bucket, config.model) > 1
    )
    tied = config.model.tie_embeddings and layout.pp > 1
    plan = lower(
        config.parallel.schedule,
        compute,
        _chunks(config, layout, config.train.micro_batch_size),
        buckets,
        (Tie(0, (0, layout.pp - 1)),) if tied else (),
        num_microbatches=num,
        num_layers=config.model.num_layers,
        training=True,
    )
    verify(plan)
    return plan


def forward_plan(config: Config, layout: Layout, num_microbatches: int, micro_batch_size: int) -> Plan:
    """Build and verify a forward-only plan (held-out loss, sampling) of the given micro-batches."""
    plan = lower(
        "forward_only",
        forward_only(layout.pp, num_microbatches),
        _chunks(config, layout, micro_batch_size),
        (),
        (),
        num_microbatches=num_microbatches,
        num_layers=config.model.num_layers,
        training=False,
    )
    verify(plan)
    return plan


def _chunks(config: Config, layout: Layout, micro_batch_size: int) -> tuple[Chunk, ...]:
    tokens = micro_batch_size * config.train.seq_len
    boundary = TensorSpec((tokens // layout.tp, config.model.hidden_size), config.train.dtype)
    return tuple(
        Chunk(
            rank,
            layers,
            input=None if rank == 0 else boundary,
            output=None if rank == layout.pp - 1 else boundary,
        )
        for rank, layers in enumerate(layout.layers)
    )
