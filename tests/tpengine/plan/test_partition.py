"""Rung: pure. Layers over stages: exact against brute force, with the tie-breaking promised."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.plan import partition, partition_layers
from tpengine.plan.schedule import looping, vee


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
    assert partition_layers(costs, first, last, range(num_stages)) == brute_force(costs, first, last, num_stages)


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
    assert partition_layers([1.0] * num_layers, first, last, range(4)) == stages


def most_even(costs: list[int], first: int, last: int, ranks: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The best of all splits: ranks by load, the slowest first, then chunks."""

    def score(ends: tuple[int, ...]) -> tuple[list[int], int, tuple[int, ...]]:
        chunks = [sum(costs[start:end]) for start, end in pairwise((0, *ends))]
        chunks[0] += first
        chunks[-1] += last
        loads = [sum(cost for cost, of in zip(chunks, ranks, strict=True) if of == rank) for rank in set(ranks)]
        return sorted(loads, reverse=True), sum(cost * cost for cost in chunks), ends

    cuts = combinations(range(1, len(costs)), len(ranks) - 1)
    return tuple(pairwise((0, *min(score((*cut, len(costs))) for cut in cuts)[2])))


SEVERAL_PER_RANK = [(0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0), (0, 1, 0, 1, 0, 1), (0, 0, 1), (0, 1, 1, 1, 0)]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.data())
def test_several_chunks_a_rank_are_balanced_by_rank(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from(SEVERAL_PER_RANK))
    num_layers = data.draw(st.integers(len(ranks), 11))
    costs = data.draw(st.lists(st.integers(0, 9), min_size=num_layers, max_size=num_layers) | st.just([2] * num_layers))
    first, last = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 6))
    assert partition_layers(costs, first, last, ranks) == most_even(costs, first, last, ranks)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.data())
def test_equal_layers_given_one_by_one_end_where_moving_them_ends(data: st.DataObject) -> None:
    """Layers of equal cost are dealt out at once; the search that moves one at a time finds the same split."""
    pp, chunks = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    ranks = data.draw(st.sampled_from([looping(pp, chunks), vee(pp)]))
    num_layers = len(ranks) + data.draw(st.integers(0, 14))
    cost, first, last = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 20)), data.draw(st.integers(0, 30))
    dealt = partition_layers([cost] * num_layers, first, last, ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "_sizes_of_equal_layers", lambda *_: None)
        moved = partition_layers([cost] * num_layers, first, last, ranks)
    assert dealt == moved


def test_many_unequal_layers_are_balanced_nearly() -> None:
    """More splits than are tried: no rank bears more than a few per cent above the mean."""
    costs = [3.0 + (7 * layer) % 5 for layer in range(40)]
    ranks = (0, 1, 2, 3, 3, 2, 1, 0)
    loads = [0.0] * 4
    for rank, (start, end) in zip(ranks, partition_layers(costs, 1.0, 8.0, ranks), strict=True):
        loads[rank] += sum(costs[start:end]) + (start == 0) * 1.0 + (end == 40) * 8.0
    assert max(loads) <= 1.05 * sum(loads) / 4


def test_a_v_of_12_layers_gives_each_rank_3() -> None:
    """Balanced by chunk, seven of one or two layers and a head, the ranks would have 2, 3, 3 and 4."""
    layers = partition_layers([1.0] * 12, 0.01, 0.2, (0, 1, 2, 3, 3, 2, 1, 0))
    sizes = [end - start for start, end in layers]
    assert [sizes[rank] + sizes[7 - rank] for rank in range(4)] == [3, 3, 3, 3]


def test_rounding_does_not_decide() -> None:
    assert partition_layers([0.1] * 6, 0.0, 0.0, range(3)) == ((0, 2), (2, 4), (4, 6))
    assert partition_layers([1e300] * 4, 1e-300, 0.0, range(2)) == ((0, 2), (2, 4))


@pytest.mark.parametrize(
    ("costs", "first", "num_stages", "message"),
    [
        ([1.0, 1.0], 0.0, 3, "2 layers do not fill 3 chunks: use at most 2 chunks"),
        ([1.0], 0.0, 0, "at least one chunk: got 0"),
        ([1.0, -1.0], 0.0, 1, "not negative: got -1.0"),
        ([1.0], math.nan, 1, "finite and not negative: got nan"),
        ([math.inf], 0.0, 1, "finite and not negative: got inf"),
    ],
)
def test_bad_arguments(costs: list[float], first: float, num_stages: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition_layers(costs, first, 0.0, range(num_stages))
