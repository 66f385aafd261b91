"""Rung: gloo ranks. A model with shared experts, gated, and frozen parts of its experts: fast and exact, recomputed.

No architecture that is built in has shared experts: this one is a test's own file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.exactness import Found, assert_same_bits, merge
from support.engine.exactness import train as train_exactly
from support.engine.parity import Outcome, compare, config_of, train
from support.ranks.rank_pool import RankPool

from tpengine.config import Config, validate
from tpengine.config.settings import ModelDetails, ParameterGroup
from tpengine.data import open_corpus
from tpengine.runs.trainer import Trainer
from tpengine.trust import permit_file

FILE = '''"""Llama with experts, shared ones among them."""

from tpengine.architectures import llama
from tpengine.architectures.describe import Architecture, Attention, Experts, Norm, column, replicate, row

TABLE = {name: rule for name, rule in llama.TABLE.items() if ".mlp." not in name}
ARCHITECTURE = Architecture(
    "SharedForCausalLM",
    {
        **TABLE,
        "layers.*.mlp.{gate,shared_expert_gate}": replicate,
        "layers.*.mlp.experts.#.{gate,up}_proj": column,
        "layers.*.mlp.experts.#.down_proj": row,
        "layers.*.mlp.shared_expert.{gate,up}_proj": column,
        "layers.*.mlp.shared_expert.down_proj": row,
    },
    lambda model, layer: {
        "input_layernorm": Norm(), "self_attn": Attention(),
        "post_attention_layernorm": Norm(), "mlp": Experts.of(model),
    },
    llama.numbers,
)
'''
DETAILS = ModelDetails(
    num_experts=6,
    experts_per_token=3,
    expert_ffn_size=16,
    router_scores="sigmoid",
    normalizes_scores=True,
    router_scale=2.5,
    expert_groups=3,
    groups_per_token=2,
    shared_expert_size=32,
    gates_shared_expert=True,
)
FROZEN = ("*.mlp.gate.weight", "*.mlp.experts.up_proj.weight")


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(FILE)
    permit_file(tmp_path / "own.py")
    return str(tmp_path / "own.py")


def configured(path: str, dp: int = 1, tp: int = 1, pp: int = 1, *, reduction: Any = "fast", **parallel: Any) -> Config:
    base = config_of(dp, tp, pp, tied=False, kv_heads=4, num_layers=2, **parallel)
    model = replace(base.model, architecture=path, details=DETAILS)
    return validate(replace(base, model=model, train=replace(base.train, reduction=reduction)), dp * tp * pp)


def trained(config: Config) -> Outcome:
    permit_file(config.model.architecture)
    return train(config)


def trained_exactly(config: Config) -> Found:
    permit_file(config.model.architecture)
    return train_exactly(config)


def drawn_weights(config: Config) -> dict[str, torch.Tensor]:
    """What a run begins with."""
    permit_file(config.model.architecture)
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    return {name: weight.detach().clone() for name, weight in trainer.state.model.held.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "parallel"),
    [
        ((1, 2, 1), {"gathered": "again"}),
        ((1, 4, 1), {"tp_comm": "plain", "recompute": "full"}),
        ((1, 2, 2), {"schedule": "zb-h1", "recompute": "block"}),
        ((2, 2, 1), {"zero": 3}),
    ],
)
def test_it_trains_in_a_layout_as_in_one_process(
    ranks: RankPool, path: str, sizes: tuple[int, int, int], parallel: dict[str, Any]
) -> None:
    alone = ranks.run(trained, 1, configured(path))[0]
    num = sizes[0] * sizes[1] * sizes[2]
    compare(ranks.run(trained, num, configured(path, *sizes, **parallel)), alone)
    # Exact mode gathers once for all shards.
    parallel = {name: value for name, value in parallel.items() if name != "gathered"}
    exact = configured(path, *sizes, reduction="exact", **parallel)
    exact_alone = configured(path, reduction="exact")
    want = merge(exact_alone, ranks.run(trained_exactly, 1, exact_alone))
    assert_same_bits(merge(exact, ranks.run(trained_exactly, num, exact)), want)


@pytest.mark.slow
def test_frozen_parts_of_experts_stay_and_the_rest_trains_as_in_one_process(ranks: RankPool, path: str) -> None:
    def frozen(config: Config) -> Config:
        groups = tuple(ParameterGroup(pattern, frozen=True) for pattern in FROZEN)
        return replace(config, optim=replace(config.optim, groups=groups))

    alone = ranks.run(trained, 1, frozen(configured(path)))[0]
    compare(ranks.run(trained, 4, frozen(configured(path, 2, 2, zero=3))), alone)
    drawn = ranks.run(drawn_weights, 1, configured(path))[0]
    for name, (_, weight) in alone[1].items():
        is_frozen = name.endswith(("mlp.gate.weight", "experts.up_proj.weight"))
        assert torch.equal(weight, drawn[name]) == is_frozen, name
