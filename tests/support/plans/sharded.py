"""Plans whose replicas hold slices of weights."""

from __future__ import annotations

from collections.abc import Sequence

from tpengine.plan import (
    Bucket,
    Chunk,
    Plan,
    Reduced,
    Residency,
    Schedule,
    TensorSpec,
    Weights,
    forward_only,
    lower,
    make_schedule,
)

BOUNDARY = TensorSpec((4, 2), "float32")


def lower_with(
    schedule: Schedule, buckets: Sequence[Bucket], residency: Residency = Residency.STEP, training: bool = True
) -> Plan:
    """Lower a schedule over a model of a layer per chunk, without ties."""
    last = len(schedule.ranks) - 1
    chunks = [
        Chunk(rank, (i, i + 1), BOUNDARY if i else None, BOUNDARY if i < last else None)
        for i, rank in enumerate(schedule.ranks)
    ]
    return lower(schedule, chunks, buckets, [], schedule.num_microbatches, last + 1, training, residency)


def sharded(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    residency: Residency,
    weights: Weights = Weights.SLICED,
    reduced: Reduced = Reduced.MICROBATCH,
    num_buckets: int = 1,
    num_chunks: int = 2,
) -> Plan:
    """Lower a schedule by its name, or "forward_only", with n buckets per chunk c: n c + n - 1, ..., n c."""
    training = name != "forward_only"
    if training:
        schedule = make_schedule(name, num_ranks, num_microbatches, num_chunks)
    else:
        schedule = forward_only(tuple(range(num_ranks)), num_microbatches)
    buckets = [
        Bucket(num_buckets * chunk + k, (chunk,), weights, reduced)
        for chunk in range(len(schedule.ranks))
        for k in reversed(range(num_buckets))
    ]
    return lower_with(schedule, buckets, residency, training)
