"""Rung: pure. Which steps leap, by the numbers of the steps before."""

from __future__ import annotations

import json
import math

import pytest

from tpengine.config import SpikeRule, spike_rule_of
from tpengine.training.spikes import Limits, SpikeWindow


def window_of(
    losses: list[float], norms: list[float] | None = None, *, spreads: float = 2.0, window: int = 8
) -> Limits:
    """The limits of the step after these."""
    spikes = SpikeWindow(SpikeRule("skip", spreads, window))
    for step, loss in enumerate(losses):
        spikes.limits(step, 0)
        spikes.add(step, loss, norms[step] if norms else 1.0)
    return spikes.limits(len(losses), 0)


def test_limits_are_the_median_and_some_spreads() -> None:
    losses = [2.0, 2.2, 1.9, 2.1, 2.4]
    limits = window_of(losses, [1.0, 40.0, 1.0, 9.0, 5.0])
    # Distances from 2.1: 0.1 0.1 0.2 0 0.3; from 5: 4 35 4 4 0.
    assert limits.loss == pytest.approx(2.1 + 2 * 1.4826 * 0.1)
    assert limits.grad_norm == pytest.approx(5 + 2 * 10)
    assert window_of(losses, [1.0, 400.0, 101.0, 99.0, 1.0]).grad_norm == pytest.approx(99 + 2 * 198)


def test_numbers_without_a_spread_have_a_least_one() -> None:
    limits = window_of([3.0] * 8)
    assert limits.loss == pytest.approx(3.06) and limits.grad_norm == pytest.approx(5.0)


def test_nothing_is_judged_before_half_a_window_and_without_a_rule() -> None:
    assert window_of([2.0] * 3) == Limits(math.inf, math.inf) != window_of([2.0] * 4)
    spikes = SpikeWindow(None)
    spikes.add(0, 1.0, 1.0)
    assert spikes.limits(1, 0) == Limits() and spikes.state()["steps"] == []


def test_the_window_moves_and_leaps_in_it_move_no_limit_until_they_are_half_of_it() -> None:
    calm = window_of([9.0] * 20 + [2.0] * 8)
    assert calm == window_of([2.0] * 8)
    assert window_of([2.0] * 5 + [50.0] * 3).loss == calm.loss
    assert window_of([2.0] * 3 + [50.0] * 5).loss > 50


def test_numbers_that_are_not_finite_are_passed_over() -> None:
    assert window_of([2.0, math.nan, 2.0, 2.0, math.inf, 2.0]) == window_of([2.0] * 4)


def test_a_phase_begins_anew() -> None:
    spikes = SpikeWindow(SpikeRule("stop", 2.0, 8))
    for step in range(8):
        spikes.add(step, 1.0, 1.0)
    assert spikes.limits(8, 0) != Limits() and spikes.first_step(8) == 0
    assert spikes.limits(8, 1) == Limits() and spikes.first_step(8) == 8


def test_a_window_goes_on_through_a_checkpoint_with_all_bits() -> None:
    spikes = SpikeWindow(SpikeRule("skip", 3.0, 8))
    spikes.limits(0, 2)
    for step in range(8):
        spikes.add(step, 1 / (step + 3), math.pi**step)
    again = SpikeWindow(spikes.rule)
    again.restore(json.loads(json.dumps(spikes.state())))
    assert again.limits(8, 2) == spikes.limits(8, 2) != Limits()
    again.restore(None)
    assert again.limits(8, 2) == Limits()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("skip", SpikeRule("skip", 10.0, 128)),
        ("rollback 20", SpikeRule("rollback", 20.0, 128)),
        (" stop  2.5 64 ", SpikeRule("stop", 2.5, 64)),
        ("", None),
    ],
)
def test_a_rule_is_read(text: str, rule: SpikeRule | None) -> None:
    assert spike_rule_of(text) == rule


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("rolback", "use rollback"),
        ("7", "use "),
        ("skip ten", "use skip"),
        ("skip 0.5", "use skip 10"),
        ("stop 3 2", "use stop 3 4"),
        ("stop 3 20000", "use stop 3 10000"),
    ],
)
def test_another_text_is_one_line(text: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=r"train\.spike") as caught:
        spike_rule_of(text)
    assert remedy in str(caught.value) and "\n" not in str(caught.value)
