"""Rung: gloo ranks. Every architecture trains to the parameters of one process in every layout, in float64.

By default one layout of each architecture; `pytest -m slow` has all. In exact mode the bits are those of one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.architectures.drawn import CONFIGS, LONGROPE, drawn_config
from support.architectures.transformers_models import config_json
from support.engine.exactness import Found, assert_same_bits, merge
from support.engine.exactness import train as train_exactly
from support.engine.parity import Outcome, compare, config_of, train
from support.ranks.rank_pool import RankPool

from tpengine.architectures.registry import model_of
from tpengine.config import Config, validate
from tpengine.layers import routing

# (dp, tp, pp), schedule
LAYOUTS = [((1, 2, 1), "1f1b"), ((1, 4, 1), "1f1b"), ((1, 1, 2), "zbv"), ((1, 2, 2), "1f1b"), ((2, 1, 2), "zbv")]
# Heads of 6 elements: hidden_size is not their product. 4 ranks share 2 KV heads.
SIZES: dict[str, Any] = dict(
    num_attention_heads=4, num_key_value_heads=2, head_dim=6, hidden_size=40, num_hidden_layers=4, intermediate_size=48
)
# What is drawn otherwise, so that every part is in a model.
PARTS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"attention_bias": False},
    "mistral": {"sliding_window": 5},
    "gpt2": {"n_embd": 24, "n_head": 4, "n_layer": 4, "n_inner": 48, "n_positions": 24, "tie_word_embeddings": True},
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"] * 2, "attention_bias": True},
    "granite": {"attention_bias": True, "residual_multiplier": 0.22},
    "phi3": {
        "hidden_size": 40,
        "sliding_window": 5,
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 8,
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 4,
            "llama_4_scaling_beta": 0.5,
        }
    },
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"] * 2, "attention_bias": True},
    # Two layers of either kind; the width of an expert is cut in four.
    "qwen3_moe": {
        "attention_bias": False,
        "moe_intermediate_size": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "smollm3": {
        "attention_bias": False,
        "no_rope_layers": [1, 0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 5,
    },
}


@functools.cache
def config(
    architecture: str, layout: tuple[int, int, int], schedule: str, zero: int = 0, reduction: str = "fast"
) -> Config:
    given = dict(SIZES) if architecture != "gpt2" else {}
    if architecture in ("qwen2", "phi3"):
        del given["head_dim"]
    theirs = drawn_config(architecture, 1, **{**given, "vocab_size": 250, **PARTS[architecture]})
    base = config_of(*layout, tied=False, kv_heads=4, schedule=schedule, num_layers=4, zero=zero)
    base = replace(base, model=model_of(config_json(theirs)), train=replace(base.train, reduction=reduction))
    return validate(base, layout[0] * layout[1] * layout[2])


def cases(by_default: Callable[[int, int], bool]) -> list[object]:
    """Return (architecture, layout, schedule); `by_default` of their places says which are not slow."""
    return [
        pytest.param(name, *case, marks=() if by_default(i, place) else pytest.mark.slow)
        for i, name in enumerate(CONFIGS)
        for place, case in enumerate(LAYOUTS)
    ]


def trained(ranks: RankPool, config: Config) -> list[Outcome]:
    parallel = config.parallel
    assert parallel.dp and parallel.tp and parallel.pp
    return ranks.run(train, parallel.dp * parallel.tp * parallel.pp, config)


# Without rotation a bias of all keys changes no probability: its gradient is rounding.
LEAST = {"gpt2": 1e-3}


@pytest.mark.by_default("qwen3-layout12-zbv", "gpt2-layout24-zbv", "llama-layout0-1f1b")
@pytest.mark.parametrize(("architecture", "layout", "schedule"), cases(lambda i, place: i % len(LAYOUTS) == place))
def test_a_layout_trains_as_one_process(
    ranks: RankPool, architecture: str, layout: tuple[int, int, int], schedule: str
) -> None:
    want = trained(ranks, config(architecture, (1, 1, 1), "1f1b"))[0]
    compare(trained(ranks, config(architecture, layout, schedule)), want, LEAST.get(architecture, 0.0))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", CONFIGS)
def test_sliced_weights_train_as_one_process(ranks: RankPool, architecture: str) -> None:
    want = trained(ranks, config(architecture, (1, 1, 1), "1f1b"))[0]
    compare(trained(ranks, config(architecture, (2, 2, 1), "1f1b", zero=3)), want, LEAST.get(architecture, 0.0))


def skewed_exactly(config: Config) -> Found:
    """Train where half of all tokens want expert 0, and none expert 1."""
    skew = torch.tensor([0.2, -9.0, 0.0, 0.0])
    choose = routing.choose_forward
    with patch.object(routing, "choose_forward", lambda logits, _, rule: choose(logits, skew, rule)):
        return train_exactly(config)


SKEWED: list[tuple[tuple[int, int, int], str, dict[str, Any]]] = [
    ((1, 2, 1), "1f1b", {}),
    ((1, 4, 1), "1f1b", {"recompute": "block"}),
    ((1, 2, 2), "zb-h1", {"recompute": "full"}),
    ((2, 2, 1), "1f1b", {"zero": 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "schedule", "settings"), SKEWED)
def test_skewed_routing_and_an_empty_expert_give_the_bits_of_one_process(
    ranks: RankPool, layout: tuple[int, int, int], schedule: str, settings: dict[str, Any]
) -> None:
    laid_out, alone = (config("mixtral", *of, reduction="exact") for of in ((layout, schedule), ((1, 1, 1), "1f1b")))
    laid_out = replace(laid_out, parallel=replace(laid_out.parallel, **settings))
    num = layout[0] * layout[1] * layout[2]
    got, want = ranks.run(skewed_exactly, num, validate(laid_out, num)), ranks.run(skewed_exactly, 1, alone)
    assert_same_bits(merge(laid_out, got), merge(alone, want))


# GPT-2 at tp 2, Gemma 3 at pp 2; OLMo 3 at tp 2, where a norm is over the heads of both ranks.
@pytest.mark.by_default("gpt2-layout20-1f1b", "olmo3-layout45-1f1b")
@pytest.mark.parametrize(
    ("architecture", "layout", "schedule"), cases(lambda i, place: (i, place) in ((4, 0), (5, 2), (9, 0)))
)
def test_exact_mode_gives_the_bits_of_one_process(
    ranks: RankPool, architecture: str, layout: tuple[int, int, int], schedule: str
) -> None:
    laid_out = config(architecture, layout, schedule, reduction="exact")
    alone = config(architecture, (1, 1, 1), "1f1b", reduction="exact")
    num = layout[0] * layout[1] * layout[2]
    got, want = ranks.run(train_exactly, num, laid_out), ranks.run(train_exactly, 1, alone)
    assert_same_bits(merge(laid_out, got), merge(alone, want))
