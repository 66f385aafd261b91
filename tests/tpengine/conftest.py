"""Plans that several test files build."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tpengine.plan import (
    SCHEDULES,
    Bucket,
    Chunk,
    CountBucket,
    Plan,
    TensorSpec,
    Tie,
    forward_only,
    lower,
    make_schedule,
    partition_layers,
)

BOUNDARY = TensorSpec((128, 64), "float32")


@pytest.fixture(scope="session")
def build_plan() -> Callable[..., Plan]:
    """Lower a schedule over a model of one layer more than chunks.

    With ties between the ends, or a bucket of both where they share a rank, and two buckets per chunk unless told. With
    counts of every rank if asked for.
    """

    def build(
        schedule: str,
        num_ranks: int,
        num_microbatches: int,
        has_buckets: bool = True,
        num_chunks: int = 2,
        has_counts: bool = False,
    ) -> Plan:
        training = schedule in SCHEDULES
        if training:
            made = make_schedule(schedule, num_ranks, num_microbatches, num_chunks)
        else:
            made = forward_only(tuple(range(num_ranks)), num_microbatches)
        ranks, last = made.ranks, len(made.ranks) - 1
        layers = partition_layers([1.0] * (len(ranks) + 1), 0.5, 1.0, ranks)
        chunks = [
            Chunk(rank, layers[chunk], BOUNDARY if chunk else None, BOUNDARY if chunk < last else None)
            for chunk, rank in enumerate(ranks)
        ]
        buckets = [Bucket(2 * chunk + k, (chunk,)) for chunk in range(len(ranks)) for k in (1, 0) if has_buckets]
        if has_buckets and last > 0 and ranks[0] == ranks[last]:
            buckets.append(Bucket(2 * len(ranks), (0, last)))
        ties = [Tie(0, (0, last))] if ranks[0] != ranks[last] else []
        ties += [Tie(1, (1, 2, last))] if len({ranks[chunk] for chunk in (1, 2, last) if chunk <= last}) == 3 else []
        counts = [
            CountBucket(2 * len(ranks) + 1 + rank, tuple(at for at, of in enumerate(ranks) if of == rank))
            for rank in range(num_ranks)
            if has_counts
        ]
        return lower(made, chunks, buckets, ties, num_microbatches, len(ranks) + 1, training=training, counts=counts)

    return build
