"""Rung: gloo ranks. A router's bias of our own: where it begins, what keeps it, and that files have no place for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.architectures.runs import beginning, begun, pieces_of, saved, saved_run
from support.ranks.rank_pool import RankPool

from tpengine.commands.weights import export
from tpengine.config import Config, ParameterGroup, validate
from tpengine.config.presets import tiny_moe
from tpengine.data import open_corpus
from tpengine.layout.groups import check_groups, frozen_of, moved_of
from tpengine.layout.parameters import layers_of_experts
from tpengine.runs.trainer import Trainer
from tpengine.training.next_phase import enter_phase

BIAS = "layers.{}.mlp.gate.e_score_correction_bias"


def balanced(config: Config) -> Config:
    assert config.parallel.tp and config.parallel.pp and config.parallel.dp
    train = replace(config.train, balance="bias", balance_rate=0.01)
    return validate(replace(config, train=train), config.parallel.tp * config.parallel.pp * config.parallel.dp)


def made(config: Config) -> dict[str, torch.Tensor]:
    """Train a run and save it; its biases."""
    return {name: values for name, (_, values) in pieces_of(saved_run(config)).items() if "correction" in name}


def begun_biases(config: Config) -> dict[str, torch.Tensor]:
    return {name: values for name, (_, values) in pieces_of(begun(config, draws=False)).items() if "correction" in name}


def test_a_bias_begins_at_zero_and_is_kept_but_no_file_has_it(ranks: RankPool, tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path / "theirs")
    first = balanced(beginning(tmp_path / "theirs", (1, 1, 1), steps=2, checkpoint_every=2))
    layers = layers_of_experts(first.model)
    names = {BIAS.format(layer) for layer in layers}
    assert layers
    (fresh,) = ranks.run(begun_biases, 1, first)
    assert fresh.keys() == names and not any(bias.any() for bias in fresh.values())
    (tmp_path / "run").mkdir()
    (kept,) = ranks.run(made, 1, replace(first, run_dir=str(tmp_path / "run")))
    assert any(bias.any() for bias in kept.values())
    # A run that begins with that one has its biases, in another layout too.
    for found in ranks.run(begun_biases, 2, balanced(beginning(tmp_path / "run", (1, 2, 1)))):
        assert all(torch.equal(found[name], kept[name]) for name in names)
    with pytest.raises(ValueError, match="no bias of a router"):
        export(tmp_path / "run", None, tmp_path / "out")


def test_a_run_without_biases_begins_one_with_them(ranks: RankPool, tmp_path: Path) -> None:
    saved("mixtral", tmp_path / "theirs")
    (tmp_path / "run").mkdir()
    before = replace(beginning(tmp_path / "theirs", steps=1, checkpoint_every=1), run_dir=str(tmp_path / "run"))
    assert ranks.run(made, 1, before) == [{}]
    (found,) = ranks.run(begun_biases, 1, balanced(beginning(tmp_path / "run")))
    assert len(found) == before.model.num_layers and not any(bias.any() for bias in found.values())


def test_a_bias_has_no_gradient_moves_with_the_setting_alone_and_stays_if_frozen() -> None:
    plain, config = validate(tiny_moe(), 1), balanced(validate(tiny_moe(), 1))
    names = frozenset(BIAS.format(layer) for layer in range(config.model.num_layers))
    assert (frozen_of(plain), moved_of(plain)) == (frozenset(), frozenset())
    assert frozen_of(config) == moved_of(config) == names
    assert not moved_of(replace(config, train=replace(config.train, balance="none")))
    frozen = replace(config.optim, groups=(ParameterGroup("model.layers.0.mlp.gate.*", frozen=True),))
    config = replace(config, optim=frozen)
    assert moved_of(config) == names - {BIAS.format(0)}
    assert frozen_of(config) == names | {"layers.0.mlp.gate.weight"}
    everything = replace(config.optim, groups=(ParameterGroup("*.weight", frozen=True),))
    with pytest.raises(ValueError, match="must leave something to train"):
        check_groups(replace(config, optim=everything))


def hashes_after_a_phase(config: Config) -> dict[str, int]:
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    trainer.state.frozen_hashes = {"a bias that stayed": 1}
    enter_phase(trainer.state, trainer.state.part)
    return dict(trainer.state.frozen_hashes)


def test_what_stayed_in_a_phase_may_move_in_the_next(ranks: RankPool) -> None:
    """The buffers are the same where only biases are thawed, and what was noted of them is not."""
    assert ranks.run(hashes_after_a_phase, 1, balanced(validate(tiny_moe(), 1))) == [{}]
