"""Rung: pure. Who owns what of an optimizer's state: everything once, balanced, cut only where that is allowed."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tpengine.modules.ownership import OwnedRows, divide


@pytest.mark.parametrize("seed", range(20))
def test_drawn_tensors_have_each_row_once_and_replicas_are_balanced(seed: int) -> None:
    draw = random.Random(seed)
    num_replicas, cuts = draw.randint(1, 6), draw.random() < 0.5
    rows = [draw.choice([0, 1, 3, 8, 50]) for _ in range(draw.randint(1, 12))]
    sizes = [num * draw.randint(1, 90) for num in rows]
    loads = [0] * num_replicas
    pieces = divide(sizes, rows, loads, cuts=cuts)
    for num, of_one in zip(rows, pieces, strict=True):
        edges = [(0, 0), *((piece.start, piece.stop) for piece in of_one), (num, num)]
        assert of_one and all(a[1] == b[0] for a, b in pairwise(edges))
        assert len({piece.owner for piece in of_one}) == len(of_one) <= (num_replicas if cuts else 1)
    largest = max(
        (
            size * (piece.stop - piece.start) // max(num, 1)
            for size, num, of in zip(sizes, rows, pieces, strict=True)
            for piece in of
        ),
        default=0,
    )
    # Greedy: nobody is given a tensor while somebody else has less.
    assert max(loads) - min(loads) <= largest


def test_a_tensor_beyond_a_share_is_cut_only_where_elements_are_alone() -> None:
    assert divide([30, 6], [10, 6], [0, 0, 0], cuts=False) == [[OwnedRows(0, 0, 10)], [OwnedRows(1, 0, 6)]]
    assert divide([30, 6], [10, 6], [0, 0, 0], cuts=True)[0] == [
        OwnedRows(1, 0, 3),
        OwnedRows(2, 3, 6),
        OwnedRows(0, 6, 10),
    ]


def test_new_tensors_go_to_whom_owns_least() -> None:
    assert divide([5], [5], [9, 2], cuts=False) == [[OwnedRows(1, 0, 5)]]
