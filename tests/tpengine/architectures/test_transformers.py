"""Rung: one process. Logits and gradients are transformers', in float64, for drawn configurations.

By default three configurations of each architecture; `pytest -m slow` has twenty.
"""

from __future__ import annotations

import pytest
from support.architectures.drawn import CONFIGS, drawn_config
from support.architectures.parity import assert_parity

BY_DEFAULT = 3


def cases() -> list[object]:
    return [
        pytest.param(name, seed, marks=() if seed < BY_DEFAULT else pytest.mark.slow)
        for name in CONFIGS
        for seed in range(20)
    ]


@pytest.mark.parametrize(("architecture", "seed"), cases())
def test_logits_and_gradients_are_those_of_transformers(architecture: str, seed: int) -> None:
    assert_parity(drawn_config(architecture, seed), seed)
