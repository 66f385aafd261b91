"""Rung: gloo ranks. The held-out loss while a run goes on: the same in all layouts, and training does not feel it.

What reads the held-out text and what a mistake in it says: test_held_out.py; signals: test_evaluation_drills.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.engine.exactness import alone, exact_config, num_ranks, train_steps
from support.engine.parity import config_of
from support.ranks.rank_pool import RankPool

from tpengine.config import Config, validate
from tpengine.data import open_corpus
from tpengine.runs.evaluation import evaluation_pass, held_out_loss, read_prompt, sample
from tpengine.runs.trainer import Trainer

CPU = torch.device("cpu")
SLOW = pytest.mark.slow


def held_out_losses(config: Config, every: int) -> list[float]:
    """The held-out losses of a run, each after `every` steps."""
    trainer = Trainer(config, open_corpus(config), CPU)
    forward, losses = evaluation_pass(trainer.state), []
    for step in range(config.train.steps):
        trainer.step.run(step)
        if (step + 1) % every == 0:
            loss = held_out_loss(trainer.state, forward)
            assert loss is not None
            losses.append(loss)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 1, 2), pytest.param((2, 2, 2), marks=SLOW)], ids=str)
def test_losses_after_20_steps_are_those_of_one_process(ranks: RankPool, layout: tuple[int, int, int]) -> None:
    config = config_of(*layout, tied=False, kv_heads=2)
    config = replace(config, train=replace(config.train, steps=20, eval_micro_batches=3, dtype="float64"))
    config = validate(config, num_ranks(config))
    (want,) = ranks.run(held_out_losses, 1, alone(config), 5)
    for got in ranks.run(held_out_losses, num_ranks(config), config, 5):
        assert got == pytest.approx(want, rel=1e-10, abs=0)
    assert len(want) == 4 and len(set(want)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 2, 1), pytest.param((2, 2, 2), marks=SLOW)], ids=str)
def test_exact_losses_have_the_same_bits(ranks: RankPool, layout: tuple[int, int, int]) -> None:
    (want,) = ranks.run(held_out_losses, 1, exact_config(layers=2, steps=3), 1)
    config = exact_config(*layout, layers=2, steps=3)
    assert ranks.run(held_out_losses, num_ranks(config), config, 1) == [want] * num_ranks(config)


def trained(config: Config, evaluates: bool) -> object:
    """Losses, norms and digests of a run that evaluates and samples after every step, or never does."""
    trainer = Trainer(config, open_corpus(config), CPU)
    numbers, digests = [], {}
    for step in range(config.train.steps):
        of_step, digests = train_steps(trainer, step, step + 1)
        numbers.append(of_step)
        if evaluates:
            assert held_out_loss(trainer.state) is not None
            sample(trainer.state, read_prompt(trainer.state, 4), 2)
    return numbers, digests


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=SLOW)])
def test_evaluating_every_step_leaves_the_bits_of_training(ranks: RankPool, zero: int) -> None:
    """With dropout, whose counters an evaluation must leave alone; ZeRO 3 gathers its weights for it."""
    config = exact_config(2, 1, 1, layers=2, steps=3)
    model = replace(config.model, residual_dropout=0.1, attention_dropout=0.1)
    config = replace(config, model=model, parallel=replace(config.parallel, zero=zero))
    want = ranks.run(trained, 2, config, False)
    assert ranks.run(trained, 2, config, True) == want
