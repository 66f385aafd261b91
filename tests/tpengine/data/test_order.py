"""Rung: pure. The order of samples is a permutation of any size, drawn by seed and epoch, and never changes.

A position says where a run is in its samples.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.data import SamplePosition, Samples, permute
from tpengine.data.order import permute_one

ORDER_OF_TEN = [4, 0, 6, 2, 3, 5, 1, 9, 8, 7]
ORDER_OF_MANY = [569018263, 356346270, 537971295, 325450371]


@pytest.mark.parametrize("num", [*range(1, 70), 255, 256, 257, 1000, 4095, 4096, 4097, 34870])
def test_permutation_is_a_bijection(num: int) -> None:
    order = permute(np.arange(num), num, seed=3, epoch=1)
    np.testing.assert_array_equal(np.sort(order), np.arange(num))


@given(num=st.integers(1, 2**62), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6))
@settings(derandomize=True, deadline=None, max_examples=50)
def test_permutation_stays_inside_for_any_size(num: int, seed: int, epoch: int) -> None:
    places = np.unique(np.linspace(0, num - 1, 64).astype(np.int64).clip(0, num - 1))
    order = permute(places, num, seed, epoch)
    assert order.min() >= 0
    assert order.max() < num
    assert len(np.unique(order)) == len(places)
    assert [permute_one(place, num, seed, epoch) for place in places.tolist()] == order.tolist()


def test_permutation_depends_on_seed_and_epoch_and_has_no_drift() -> None:
    places = np.arange(5000)
    orders = [permute(places, 5000, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for number, order in enumerate(orders):
        assert abs(np.corrcoef(places, order)[0, 1]) < 0.05
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05
        for other in orders[number + 1 :]:
            assert (order == other).mean() < 0.01


def test_the_order_is_what_it_always_was() -> None:
    """A changed order would silently change every run that is continued."""
    assert permute(np.arange(10), 10, 0, 0).tolist() == ORDER_OF_TEN
    assert permute(np.arange(4), 10**9, 7, 2).tolist() == ORDER_OF_MANY


@pytest.mark.parametrize("left_out", [(), ((0, 3),), ((5, 6),), ((2, 4), (4, 9), (20, 31))])
def test_sample_i_is_the_ith_that_is_not_left_out(left_out: tuple[tuple[int, int], ...]) -> None:
    gone = {number for first, end in left_out for number in range(first, end)}
    kept = [number for number in range(100) if number not in gone][:50]
    for consumed, first, count in ((0, 0, 50), (0, 7, 9), (13, 0, 20), (13, 5, 1)):
        position = SamplePosition(0, consumed, left_out)
        assert position.samples(first, count).tolist() == kept[consumed + first :][:count]
        assert position.after(first).samples(0, count).tolist() == kept[consumed + first :][:count]


def test_what_the_next_samples_are_can_be_left_out() -> None:
    position = SamplePosition(0, 4, ((6, 8),))
    assert position.range_of(4) == ((4, 6), (8, 10))
    without = SamplePosition(0, 4, ((4, 10),))
    assert without.samples(0, 3).tolist() == position.samples(4, 3).tolist()


@pytest.mark.parametrize("left_out", [((3, 3),), ((5, 4),), ((4, 8), (7, 9)), ((4, 8), (1, 2))])
def test_ranges_must_ascend(left_out: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="must ascend"):
        SamplePosition(left_out=left_out)


def test_each_phase_has_an_order_of_its_own_over_all_windows() -> None:
    first = Samples(np.arange(97, dtype=np.uint16), 8, 256, seed=3)
    second = replace(first, phase=1)
    orders = [samples.batch(0, 12)[0][:, 0].tolist() for samples in (first, second)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    np.testing.assert_array_equal(first.read(np.array([7, 2]))[0][1], first.batch(2, 1)[0][0])
