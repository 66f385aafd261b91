"""Rung: gloo ranks. Every schedule trains, with every memory choice, to the parameters of one process, in float64.

As test_parity.py, over 8 layers, so that 4 ranks hold 2 chunks each. The plan that runs is the verified one: what each
rank holds live is counted while it runs and compared with the plan's figure.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.parity import Outcome, compare, config_of, outcome_of, train
from support.ranks.rank_pool import RankPool

from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.plan import clock
from tpengine.runs.evaluation import held_out_loss
from tpengine.runs.trainer import Trainer

SPLIT = ("zb-h1", "zbv")


@pytest.fixture(scope="module")
def references(ranks: RankPool) -> dict[bool, Outcome]:
    """What one process trains to, by whether the embeddings are tied."""
    configs = {tied: config_of(1, 1, 1, tied=tied, kv_heads=1, num_layers=8) for tied in (False, True)}
    return {tied: ranks.run(train, 1, config)[0] for tied, config in configs.items()}


def train_counted(config: Config) -> Outcome:
    """Train, and compare the most micro-batches that were live with the plan's figure."""
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    outcome = outcome_of(trainer)
    planned = clock(trainer.state.part.plan.actions).peak_live_activations[trainer.state.rank.mesh.at.pp] * len(
        trainer.step.stages
    )
    assert trainer.step.pipeline.most_live == planned, (trainer.step.pipeline.most_live, planned)
    return outcome


# By default each schedule on two ranks, in turns of tied and untied embeddings; every combination is slow.
COMBINATIONS = [
    pytest.param(schedule, *layout, tied, marks=() if (j, tied) == (0, bool(i % 2)) else pytest.mark.slow)
    for i, schedule in enumerate(("gpipe", "1f1b", "interleaved", "zb-h1", "zbv"))
    for j, layout in enumerate(((1, 1, 2), (2, 2, 2), (1, 1, 4)))
    for tied in (False, True)
]


@pytest.mark.by_default("1f1b-1-1-2-True", "zbv-1-1-2-False")
@pytest.mark.parametrize(("schedule", "dp", "tp", "pp", "tied"), COMBINATIONS)
def test_parity_of_every_schedule(
    ranks: RankPool, references: dict[bool, Outcome], schedule: str, dp: int, tp: int, pp: int, tied: bool
) -> None:
    config = config_of(dp, tp, pp, tied=tied, kv_heads=1, schedule=schedule, num_layers=8)
    compare(ranks.run(train_counted, dp * tp * pp, config), references[tied])


@pytest.mark.by_default("zbv")
@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zbv"])
def test_one_rank_runs_every_schedule(ranks: RankPool, references: dict[bool, Outcome], schedule: str) -> None:
    config = config_of(1, 1, 1, tied=True, kv_heads=1, schedule=schedule, num_layers=8)
    compare(ranks.run(train_counted, 1, config), references[True])


MEMORY: dict[str, dict[str, Any]] = {
    "attention again": {"recompute": "attention"},
    "blocks again": {"recompute": "block"},
    "stages again": {"recompute": "full"},
    "gathered again": {"gathered": "again"},
    "blocks and gathered again": {"recompute": "block", "gathered": "again"},
}


# By default each choice by itself on two ranks, in turns of schedules: of tp where something is gathered, else of pp.
MEMORY_COMBINATIONS = [
    pytest.param(("1f1b", "zbv")[i % 2], choice, *((1, 2, 1) if "gathered" in MEMORY[choice] else (1, 1, 2)), id=choice)
    for i, choice in enumerate(MEMORY)
    if len(MEMORY[choice]) == 1
] + [
    pytest.param(schedule, choice, 1, 2, 2, marks=pytest.mark.slow) for choice in MEMORY for schedule in ("1f1b", "zbv")
]


@pytest.mark.by_default("gathered again")
@pytest.mark.parametrize(("schedule", "choice", "dp", "tp", "pp"), MEMORY_COMBINATIONS)
def test_parity_of_every_memory_choice(
    ranks: RankPool, references: dict[bool, Outcome], schedule: str, choice: str, dp: int, tp: int, pp: int
) -> None:
    config = config_of(dp, tp, pp, tied=True, kv_heads=1, schedule=schedule, num_layers=8, **MEMORY[choice])
    compare(ranks.run(train_counted, dp * tp * pp, config), references[True])


@pytest.mark.slow
def test_four_chunks_a_rank(ranks: RankPool, references: dict[bool, Outcome]) -> None:
    config = config_of(1, 1, 2, tied=True, kv_heads=1, schedule="interleaved", chunks_per_rank=4, num_layers=8)
    compare(ranks.run(train_counted, 2, config), references[True])


def test_a_schedule_of_a_users_own(ranks: RankPool, references: dict[bool, Outcome], tmp_path: Path) -> None:
    """Three chunks on two ranks, two of them neighbours; one rank splits its backward, in an order of its own."""
    path = tmp_path / "mine.txt"
    path.write_text(
        "# chunk 0 and 1 on rank 0, chunk 2 on rank 1\n"
        "rank 0: 0F0 1F0 0F1 1F1 0F2 1F2 0F3 1F3 1I1 1I0 1W0 1W1 0B1 0B0 1B2 0I2 0W2 1B3 0B3\n"
        "rank 1: 2F0 2F1 2B1 2B0 2F2 2B2 2F3 2I3 2W3\n"
    )
    config = config_of(1, 1, 2, tied=True, kv_heads=1, schedule=str(path), num_layers=8)
    compare(ranks.run(train_counted, 2, config), references[True])


def train_and_evaluate(config: Config) -> list[float | None]:
    """Losses of a step, of 40 held-out micro-batches, of another step and of them again: four plans, one mailbox."""
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    return [
        trainer.step.run(0).loss,
        held_out_loss(trainer.state),
        trainer.step.run(1).loss,
        held_out_loss(trainer.state),
    ]


@pytest.mark.slow
def test_evaluation_over_chunks_that_lie_unevenly(ranks: RankPool, tmp_path: Path) -> None:
    """One rank receives for every micro-batch long before it can go on with any."""
    path = tmp_path / "uneven.txt"
    path.write_text(
        "rank 0: 0F0 0F1 0F2 0F3 4F0 4B0 4F1 4B1 4F2 4B2 4F3 4B3 0B0 0B1 0B2 0B3\n"
        "rank 1: 1F0 2F0 3F0 1F1 2F1 3F1 1F2 2F2 3F2 1F3 2F3 3F3 "
        "3B0 2B0 1B0 3B1 2B1 1B1 3B2 2B2 1B2 3B3 2B3 1B3\n"
    )
    alone, uneven = (
        config_of(1, 1, pp, tied=False, kv_heads=1, schedule=name, num_layers=8)
        for pp, name in ((1, "1f1b"), (2, str(path)))
    )
    alone, uneven = (replace(config, train=replace(config.train, eval_micro_batches=40)) for config in (alone, uneven))
    (expected,) = ranks.run(train_and_evaluate, 1, alone)
    for losses in ranks.run(train_and_evaluate, 2, uneven):
        assert losses == pytest.approx(expected, rel=1e-9)
