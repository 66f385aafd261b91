"""The learning rate against its formulas. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from tpengine.config import Config, OptimConfig, validate
from tpengine.planner.draw.learning_rate import draw_learning_rate
from tpengine.training.learning_rate import learning_rate

LR, RATIO, N, W = 2.0, 0.1, 60, 7


def formula(schedule: str, step: int) -> float:
    """As the module's head has it, written again."""
    if step < W:
        return LR * (step + 1) / W
    begin = 48 if schedule == "wsd" else W
    p = min(1.0, max(0.0, (step - begin) / (N - 1 - begin)))
    f = {"cosine": (1 + math.cos(math.pi * p)) / 2, "linear": 1 - p, "wsd": 1 - p**0.5, "constant": 1.0}[schedule]
    return LR * (RATIO + (1 - RATIO) * f)


def config_of(schedule: Any, **changes: Any) -> OptimConfig:
    return OptimConfig(lr=LR, warmup_steps=W, min_lr_ratio=RATIO, schedule=schedule, **changes)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_every_step_has_the_rate_of_the_formula(schedule: str) -> None:
    rates = [learning_rate(config_of(schedule), step, N) for step in range(80)]
    assert rates == pytest.approx([formula(schedule, step) for step in range(80)], rel=1e-14)
    # Neither warm-up nor decay has a jump of more than its steepest step.
    assert max(abs(a - b) for a, b in pairwise(rates)) <= LR * max(1 / W, 0.9 * (1 / 11) ** 0.5) + 1e-12


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_in_tokens_it_is_the_same_curve_over_tokens(schedule: str) -> None:
    """Steps of 32 tokens: W and N in tokens. The end is after the last step, not before it."""
    config = config_of(schedule, decay_from="1600 tokens" if schedule == "wsd" else 0)
    config = replace(config, warmup_steps=f"{32 * W} tokens")
    in_tokens = [learning_rate(config, step, "1920 tokens", lambda step: 32 * step) for step in range(80)]
    begin = 50 if schedule == "wsd" else 0
    in_steps = [learning_rate(config_of(schedule, decay_from=begin), step, N + 1) for step in range(80)]
    assert in_tokens == pytest.approx(in_steps, rel=1e-14)


def test_a_step_that_becomes_larger_makes_no_jump() -> None:
    """Steps of 32 tokens, then of 256: no change of rate is larger than the decay's slope times the step's tokens."""

    def before(step: int) -> int:
        return 32 * min(step, 40) + 256 * max(0, step - 40)

    config = replace(config_of("linear"), warmup_steps="64 tokens")
    rates = [learning_rate(config, step, "6400 tokens", before) for step in range(60)]
    for step in range(3, 59):
        assert rates[step - 1] - rates[step] == pytest.approx(
            LR * (1 - RATIO) * (before(step) - before(step - 1)) / (6400 - 64)
        )


@pytest.mark.parametrize("unit", ["steps", "tokens"])
def test_units_may_differ(unit: str) -> None:
    """A warm-up in the one unit, a decay in the other: the decay begins where the warm-up ends."""
    warmup, end = (7, "1920 tokens") if unit == "steps" else ("220 tokens", N)
    config = replace(config_of("linear"), warmup_steps=warmup)
    rates = [learning_rate(config, step, end, lambda step: 32 * step) for step in range(60)]
    assert rates[6] == pytest.approx(LR) and rates[7] == pytest.approx(LR) and rates[8] < LR


def test_a_warm_up_again_begins_at_the_rate_before() -> None:
    rates = [learning_rate(config_of("constant"), step, N, rate_before=0.6) for step in range(8)]
    assert rates == pytest.approx([0.6 + 1.4 * (step + 1) / 7 for step in range(7)] + [2.0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"decay_from": 250},
            ["must begin before its end", "decay_from 250 steps", "decay_steps 250", "decay_from 200"],
        ),
        (
            # 4096 tokens a step.
            {"decay_from": "1024000 tokens"},
            ["must begin before its end", "decay_from 1024000 tokens", "decay_steps 250", "decay_from 200"],
        ),
        (
            {"decay_from": 3, "decay_steps": "12288 tokens"},
            ["must begin before its end", "decay_from 3 steps", "decay_steps 12288 tokens", "decay_from 9830 tokens"],
        ),
        (
            {"decay_from": "9 tokens", "decay_steps": "8 tokens"},
            ["must begin before its end", "use optim.decay_from 6 tokens"],
        ),
        ({"warmup_steps": "4e9 tokns"}, ["optim.warmup_steps", "'4e9 tokns'", '"4e9 tokens"']),
        ({"decay_steps": "1.5 tokens"}, ["optim.decay_steps", "'1.5 tokens'"]),
        ({"schedule": "cosin"}, ["optim.schedule must be one of cosine, linear, constant, wsd"]),
    ],
)
def test_what_is_no_schedule_is_refused_in_one_line(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        validate(Config(optim=OptimConfig(**changes)), 1)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value), str(error.value)


def test_the_picture_shows_every_step_of_a_short_run_and_the_borders() -> None:
    picture = ElementTree.fromstring(draw_learning_rate(lambda step: formula("wsd", step), N, [20, 48]))
    (line,) = (element for element in picture.iter() if element.get("class") == "rate")
    ys = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert len(ys) == N
    # The axis: zero at 206, the peak at 34.
    assert ys == pytest.approx([206 - 172 * formula("wsd", step) / LR for step in range(N)], abs=0.051)
    assert [element.get("class") for element in picture.iter()].count("border") == 2
