"""Rung: pure. The order of samples is a permutation of any size, drawn by seed and epoch, and never changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.data import permute
from tpengine.data.order.permutation import permute_one

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
