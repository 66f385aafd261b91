"""Rung: pure. Distances in roundings, blocks put together, bounds that hold and that do not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tpengine.commands.certify_compare import FACTOR, Distance, Distances, ReplicasDiffer, assembled


@dataclass(frozen=True)
class Block:
    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    values: NDArray[np.float64]


def test_blocks_are_put_where_they_belong() -> None:
    whole = np.arange(24.0).reshape(6, 4)
    blocks = [Block("w", (r, c), (6, 4), whole[r : r + 3, c : c + 2]) for r in (0, 3) for c in (0, 2)]
    assert np.array_equal(assembled(blocks)["w"], whole)
    again = Block("w", (0, 0), (6, 4), whole)
    assert np.array_equal(assembled([*blocks, again])["w"], whole)
    for order in ([*blocks, replace(again, values=whole + 1e-12)], [replace(again, values=whole + 1e-12), *blocks]):
        with pytest.raises(ReplicasDiffer, match="w"):
            assembled(order)
    missing = assembled(blocks[1:])["w"]
    assert np.isnan(missing[:3, :2]).all() and not np.isnan(missing[3:]).any()


@pytest.mark.parametrize(("dtype", "roundoff"), [("float32", 2.0**-24), ("bfloat16", 2.0**-8)])
def test_one_rounding_is_one(dtype: str, roundoff: float) -> None:
    wide = np.array([1.0, 1.0, -1.0, 1.0])
    distances = Distances(dtype)
    for _ in range(3):
        distances.add({"w": wide * (1 + 4 * roundoff)}, {"w": wide * (1 + roundoff)}, {"w": wide})
    (found,) = distances.of_tensors()
    assert found.of_exact == pytest.approx(1, rel=2e-2) and found.of_fast == pytest.approx(3, rel=2e-2)
    assert found.bound == FACTOR * found.of_exact


def test_bounds() -> None:
    assert Distance("w", 2.9, 1.0).holds and not Distance("w", 3.1, 1.0).holds
    assert not Distance("w", math.nan, 1.0).holds and not Distance("w", 1.0, math.nan).holds
    assert Distance("w", 0.0, 0.0).holds and not Distance("w", 1e-9, 0.0).holds
    assert Distance("w", 0.0, 0.0).share == 0 and Distance("w", 1e-9, 0.0).share == math.inf
    assert Distance("w", 1.5, 1.0).share == 0.5 and Distance("w", 1.5, 1.0, 2.0**-24).noticed_from == 4.5 * 2.0**-24


def test_a_block_that_no_rank_had_is_beyond_every_bound() -> None:
    distances, wide = Distances("float32"), np.ones((2, 2))
    distances.add({"w": np.array([[1.0, 1.0], [np.nan, 1.0]])}, {"w": wide * (1 + 2.0**-24)}, {"w": wide})
    assert not distances.of_tensors()[0].holds


def test_vocabulary_padding_is_left_out() -> None:
    distances = Distances("float32")
    distances.add({"w": np.ones((2, 2))}, {"w": np.ones((3, 2))}, {"w": np.ones((3, 2))})
    assert distances.of_tensors()[0].of_fast == 0


def test_a_tensor_that_is_zero_must_be_zero() -> None:
    distances = Distances("float32")
    distances.add({"w": np.zeros(3)}, {"w": np.zeros(3)}, {"w": np.zeros(3)})
    assert distances.of_tensors()[0] == Distance("w", 0.0, 0.0, 2.0**-24)
    distances.add({"w": np.full(3, 1e-30)}, {"w": np.zeros(3)}, {"w": np.zeros(3)})
    assert not distances.of_tensors()[0].holds
