"""Rung: gloo ranks. Training by torch's attention, in layouts and schedules: to the parameters of ours in one process.

With norms of heads, whose gradients come out of the pass that prepares heads, into sinks that may defer them; with
attention computed again. The backend is the one that a CPU has. Cells of other layouts are slow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.engine.parity import Outcome, compare, config_of, train
from support.ranks.rank_pool import RankPool
from tpkernels.ops.attention import choice
from tpkernels.ops.attention.choice import Choice, Problem

from tpengine.config import Config
from tpengine.layers import torch_attention


def with_norms_of_heads(*layout: int, **settings: Any) -> Config:
    config = config_of(*layout, tied=False, kv_heads=1, **settings)
    return replace(config, model=replace(config.model, architecture="qwen3"))


def train_by_torch(config: Config) -> tuple[Outcome, int]:
    """Train, with the backend that a CPU has taken for every call; return how many there were too."""
    backends = []
    kept = torch_attention.attention_by_torch

    def counted(*given: Any, **options: Any) -> Any:
        backends.append(given[3])
        return kept(*given, **options)

    def forced(problem: Problem, whose: str) -> Choice:
        return Choice("math", "a test")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "choose", forced)
        patch.setattr(torch_attention, "attention_by_torch", counted)
        return train(config), backends.count("math")


@pytest.fixture(scope="module")
def ours(ranks: RankPool) -> Outcome:
    return ranks.run(train, 1, with_norms_of_heads(1, 1, 1))[0]


SLOW = pytest.mark.slow


@pytest.mark.by_default("pp, deferred")
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        pytest.param((1, 2, 1), {"recompute": "attention"}, id="tp, computed again"),
        pytest.param((1, 1, 2), {"schedule": "zb-h1", "zero": 0}, id="pp, deferred"),
        pytest.param((2, 2, 1), {"zero": 3, "recompute": "block"}, id="dp, tp, sliced", marks=SLOW),
        pytest.param((1, 2, 2), {"schedule": "zbv", "recompute": "full"}, id="tp, pp, all again", marks=SLOW),
    ],
)
def test_layouts(ranks: RankPool, ours: Outcome, layout: tuple[int, int, int], settings: dict[str, Any]) -> None:
    dp, tp, pp = layout
    outcomes = ranks.run(train_by_torch, dp * tp * pp, with_norms_of_heads(*layout, **settings))
    assert all(number > 0 for _, number in outcomes)
    compare([outcome for outcome, _ in outcomes], ours)
