"""Plans that several test files build."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
)

BOUNDARY = TensorSpec((128, 64), "float32")


@pytest.fixture(scope="session")
def build_plan() -> Callable[..., Plan]:
    """Lower a schedule over a model of p+1 layers, ties between the ends, two buckets per chunk unless told."""

    def build(schedule: str, num_ranks: int, num_microbatches: int, has_buckets: bool = True) -> Plan:
        layers = partition_layers([1.0] * (num_ranks + 1), 0.5, 1.0, num_ranks)
        last = num_ranks - 1
        chunks = [
            Chunk(rank, layers[rank], BOUNDARY if rank else None, BOUNDARY if rank < last else None)
            for rank in range(num_ranks)
        ]
        buckets = [Bucket(2 * chunk + k, chunk) for chunk in range(num_ranks) for k in (1, 0) if has_buckets]
        ties = [Tie(0, (0, last))] if num_ranks > 1 else []
        ties += [Tie(1, (1, 2, last))] if num_ranks > 3 else []
        training = schedule in SCHEDULES
        compute = SCHEDULES.get(schedule, forward_only)(num_ranks, num_microbatches)
        return lower(schedule, compute, chunks, buckets, ties, num_microbatches, num_ranks + 1, training=training)

    return build
