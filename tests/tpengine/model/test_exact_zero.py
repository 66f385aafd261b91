"""Rung: gloo ranks. Exact mode where replicas own slices (ZeRO): the bits of one process, at every stage.

A tensor's slices are whole blocks of 1024 elements, of which the largest tensors here have several, and the smallest
less than one.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.engine.exactness import alone, assert_same_bits, exact_config, merge, num_ranks, train
from support.ranks.rank_pool import RankPool

# Layout, stage, residency, dtype, schedule, tied. By default the one that gathers and frees most.
CASES = [
    ((2, 1, 1), 3, "use", "float32", "1f1b", True),
    *(
        pytest.param(layout, zero, residency, dtype, schedule, tied, marks=pytest.mark.slow)
        for layout, zero, residency, dtype, schedule, tied in (
            ((2, 2, 1), 3, "step", "float32", "1f1b", True),
            ((2, 1, 2), 3, "use", "bfloat16", "zbv", True),
            ((2, 1, 1), 1, "auto", "float32", "1f1b", False),
            ((2, 1, 2), 2, "auto", "float16", "interleaved", True),
            ((4, 1, 1), 3, "use", "float64", "1f1b", False),
            ((4, 1, 2), 3, "step", "float32", "zbv", True),
            ((2, 4, 1), 3, "use", "float32", "1f1b", False),
            ((2, 2, 2), 1, "auto", "bfloat16", "gpipe", True),
        )
    ),
]


@pytest.mark.parametrize(("layout", "zero", "residency", "dtype", "schedule", "tied"), CASES)
def test_slices_have_the_bits_of_one_process(
    ranks: RankPool, layout: tuple[int, int, int], zero: int, residency: str, dtype: Any, schedule: str, tied: bool
) -> None:
    # zbv and interleaved cut the model into two chunks per rank.
    layers = 2 if layout[2] == 1 else 8
    config = exact_config(
        *layout, dtype=dtype, schedule=schedule, tied=tied, zero=zero, residency=residency, layers=layers
    )
    assert num_ranks(config) == math.prod(layout)
    reference = alone(config)
    want = merge(reference, ranks.run(train, 1, reference))
    assert_same_bits(merge(config, ranks.run(train, num_ranks(config), config)), want)
