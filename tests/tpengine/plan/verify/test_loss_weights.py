"""Rung: pure. Loss weights make one mean: exactly where they are fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tpengine.plan import PlanError, verify_loss_weights


@pytest.mark.parametrize(
    "weights",
    [
        [[Fraction(1)]],
        [[Fraction(1, 3), Fraction(1, 6)], [Fraction(0), Fraction(1, 2)]],
        [[0.1] * 5, [0.1] * 5],
        [[1]],
        [[0.5, Fraction(1, 2)]],
    ],
)
def test_loss_weights(weights: list[list[Fraction | float]]) -> None:
    verify_loss_weights(weights)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([[Fraction(1, 3)] * 2, [Fraction(1, 3) + Fraction(1, 10**30)]], "loss weights sum to one: got"),
        ([[0.25, 0.25], [0.25, 0.25 + 1e-11]], "loss weights sum to one: got"),
        ([[0.5, 0.5], [0.5, 0.5]], "loss weights sum to one: got 2.0"),
        ([], "loss weights sum to one: got 0"),
        ([[1.5], [-0.5]], "loss weights are not negative: -0.5 at replica 1, micro-batch 0"),
        ([[float("nan")]], "loss weights are not negative: nan"),
        ([[float("inf")]], "loss weights sum to one: got inf"),
    ],
)
def test_bad_loss_weights(weights: list[list[Fraction | float]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        verify_loss_weights(weights)
