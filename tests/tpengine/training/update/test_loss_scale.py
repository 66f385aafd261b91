"""Rung: pure. The loss scale: when it moves, how far, and that a checkpoint brings it back."""

from __future__ import annotations

import pytest

from tpengine.training.loss_scale import CEILING, FIRST_SCALE, FLOOR, GROWTH_STEPS, LossScale


def test_it_halves_at_once_and_doubles_after_many_updates() -> None:
    scale = LossScale("float16")
    scale.after_overflow()
    assert scale.value == FIRST_SCALE / 2
    for _ in range(GROWTH_STEPS - 1):
        scale.after_update()
    # An overflow begins the count anew.
    scale.after_overflow()
    assert scale.value == FIRST_SCALE / 4
    for _ in range(GROWTH_STEPS):
        assert scale.value == FIRST_SCALE / 4
        scale.after_update()
    assert scale.value == FIRST_SCALE / 2


def test_it_stays_within_its_bounds() -> None:
    scale = LossScale("float16")
    while scale.can_fall:
        scale.after_overflow()
    scale.after_overflow()
    assert scale.value == FLOOR
    scale.restore({"value": CEILING, "updates": GROWTH_STEPS - 1})
    scale.after_update()
    assert scale.value == CEILING


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_other_dtypes_need_none(dtype: str) -> None:
    scale = LossScale(dtype)
    scale.after_overflow()
    for _ in range(GROWTH_STEPS):
        scale.after_update()
    assert scale.value == 1.0 and not scale.can_fall
    scale.restore({"value": 4.0, "updates": 3})
    assert scale.value == 1.0


def test_what_is_saved_goes_on_alike() -> None:
    one, other = LossScale("float16"), LossScale("float16")
    one.after_overflow()
    for _ in range(GROWTH_STEPS // 2):
        one.after_update()
    other.restore(one.state())
    for _ in range(GROWTH_STEPS // 2):
        one.after_update()
        other.after_update()
    assert one.value == other.value == FIRST_SCALE
    other.restore(None)
    assert other.value == FIRST_SCALE
