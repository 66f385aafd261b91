"""Rung: pure. Layers over stages: exact against brute force, with the tie-breaking promised."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.plan import partition_layers


def brute_force(costs: list[int], first: int, last: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    def score(ends: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        stages = [sum(costs[start:end]) for start, end in pairwise((0, *ends))]
        stages[0] += first
        stages[-1] += last
        return max(stages), sum(stage * stage for stage in stages), ends

    cuts = combinations(range(1, len(costs)), num_stages - 1)
    best = min(score((*cut, len(costs))) for cut in cuts)[2]
    return tuple(pairwise((0, *best)))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.data())
def test_equals_brute_force(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=9))
    num_stages = data.draw(st.integers(1, len(costs)))
    first, last = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 6))
    assert partition_layers(costs, first, last, num_stages) == brute_force(costs, first, last, num_stages)


@pytest.mark.parametrize(
    ("num_layers", "first", "last", "stages"),
    [
        (8, 0.0, 0.0, ((0, 2), (2, 4), (4, 6), (6, 8))),
        (5, 0.0, 0.0, ((0, 1), (1, 2), (2, 3), (3, 5))),
        (5, 0.0, 1.0, ((0, 1), (1, 2), (2, 4), (4, 5))),
        (5, 1.0, 1.0, ((0, 1), (1, 2), (2, 4), (4, 5))),
        (10, 1.0, 2.0, ((0, 2), (2, 5), (5, 8), (8, 10))),
    ],
)
def test_four_stages(num_layers: int, first: float, last: float, stages: object) -> None:
    assert partition_layers([1.0] * num_layers, first, last, 4) == stages


def test_rounding_does_not_decide() -> None:
    assert partition_layers([0.1] * 6, 0.0, 0.0, 3) == ((0, 2), (2, 4), (4, 6))
    assert partition_layers([1e300] * 4, 1e-300, 0.0, 2) == ((0, 2), (2, 4))


@pytest.mark.parametrize(
    ("costs", "first", "num_stages", "message"),
    [
        ([1.0, 1.0], 0.0, 3, "2 layers do not fill 3 stages, use at most 2 stages"),
        ([1.0], 0.0, 0, "at least one stage: got 0"),
        ([1.0, -1.0], 0.0, 1, "not negative: got -1.0"),
        ([1.0], math.nan, 1, "finite and not negative: got nan"),
        ([math.inf], 0.0, 1, "finite and not negative: got inf"),
    ],
)
def test_bad_arguments(costs: list[float], first: float, num_stages: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition_layers(costs, first, 0.0, num_stages)
