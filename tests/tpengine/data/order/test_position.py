"""Where a run is in its samples. Pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tpengine.data import Position, Samples


@pytest.mark.parametrize("left_out", [(), ((0, 3),), ((5, 6),), ((2, 4), (4, 9), (20, 31))])
def test_sample_i_is_the_ith_that_is_not_left_out(left_out: tuple[tuple[int, int], ...]) -> None:
    gone = {number for first, end in left_out for number in range(first, end)}
    kept = [number for number in range(100) if number not in gone][:50]
    for consumed, first, count in ((0, 0, 50), (0, 7, 9), (13, 0, 20), (13, 5, 1)):
        position = Position(0, consumed, left_out)
        assert position.samples(first, count).tolist() == kept[consumed + first :][:count]
        assert position.after(first).samples(0, count).tolist() == kept[consumed + first :][:count]


def test_what_the_next_samples_are_can_be_left_out() -> None:
    position = Position(0, 4, ((6, 8),))
    assert position.range_of(4) == ((4, 6), (8, 10))
    without = Position(0, 4, ((4, 10),))
    assert without.samples(0, 3).tolist() == position.samples(4, 3).tolist()


@pytest.mark.parametrize("left_out", [((3, 3),), ((5, 4),), ((4, 8), (7, 9)), ((4, 8), (1, 2))])
def test_ranges_must_ascend(left_out: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="must ascend"):
        Position(left_out=left_out)


def test_each_phase_has_an_order_of_its_own_over_all_windows() -> None:
    first = Samples(np.arange(97, dtype=np.uint16), 8, 256, seed=3)
    second = replace(first, phase=1)
    orders = [samples.batch(0, 12)[0][:, 0].tolist() for samples in (first, second)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    np.testing.assert_array_equal(first.read(np.array([7, 2]))[0][1], first.batch(2, 1)[0][0])
