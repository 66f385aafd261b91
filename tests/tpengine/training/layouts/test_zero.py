"""Rung: gloo ranks. Every stage of ZeRO trains to the parameters of one process, in float64, in every layout.

As test_parity.py. By default each stage in one layout, in turns; `pytest -m slow` has the whole product.
What only GPUs check: gathers and reduce-scatters of NCCL beside kernels.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from support.engine.parity import Outcome, compare, config_of, outcome_of, train
from support.ranks.rank_pool import RankPool

from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.plan import Kind
from tpengine.runs.evaluation import held_out_loss, sample
from tpengine.runs.trainer import Trainer

STAGES = [(1, "auto"), (2, "auto"), (3, "step"), (3, "use")]
LAYOUTS = [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)]
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zbv"]
BY_DEFAULT = [
    (1, "auto", (2, 1, 1), "1f1b", True),
    (2, "auto", (2, 1, 2), "interleaved", True),
    (3, "step", (2, 2, 1), "1f1b", False),
    (3, "use", (2, 1, 2), "zbv", True),
]


def cases() -> list[object]:
    everything = [
        (zero, residency, layout, schedule, tied)
        for (zero, residency), layout, schedule, tied in itertools.product(STAGES, LAYOUTS, SCHEDULES, (False, True))
        # Alone on its stage a rank runs the same actions in every schedule but interleaved.
        if layout[2] > 1 or schedule in ("1f1b", "interleaved")
    ]
    return [pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.slow) for case in everything]


@pytest.fixture(scope="module")
def references(ranks: RankPool) -> dict[bool, Outcome]:
    """What one process trains to, by whether the embeddings are tied."""
    configs = {tied: config_of(1, 1, 1, tied=tied, kv_heads=1, num_layers=8) for tied in (False, True)}
    return {tied: ranks.run(train, 1, config)[0] for tied, config in configs.items()}


def train_and_count(config: Config) -> Outcome:
    """Train; the plan gathers what its stage says, and nothing is left that it has freed."""
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    actions = trainer.state.part.plan.actions[trainer.state.rank.mesh.at.pp]
    gathered = sum(len(action.gathers) for action in actions)
    num_buckets = len(trainer.state.buckets.flat)
    assert trainer.state.sliced is not None
    if config.parallel.residency == "use":
        assert gathered > num_buckets
    else:
        assert gathered == num_buckets
    frees = sum(action.kind is Kind.FREE or any(s.kind is Kind.FREE for s in action.subs) for action in actions)
    assert bool(frees) == (config.parallel.zero == 3)
    outcome = outcome_of(trainer)
    has_memory = [flat.untyped_storage().nbytes() > 0 for flat in trainer.state.sliced.flat.values()]
    assert has_memory == [config.parallel.zero < 3] * num_buckets
    assert [trainer.state.buckets.has_memory(index) for index in trainer.state.buckets.flat] == [
        config.parallel.zero < 2
    ] * num_buckets
    return outcome


@pytest.mark.by_default("3-use-layout103-zbv-True", "2-auto-layout45-interleaved-True")
@pytest.mark.parametrize(("zero", "residency", "layout", "schedule", "tied"), cases())
def test_parity_of_every_stage(
    ranks: RankPool,
    references: dict[bool, Outcome],
    zero: int,
    residency: str,
    layout: tuple[int, int, int],
    schedule: str,
    tied: bool,
) -> None:
    dp, tp, pp = layout
    config = config_of(
        dp, tp, pp, tied=tied, kv_heads=1, schedule=schedule, num_layers=8, zero=zero, residency=residency
    )
    compare(ranks.run(train_and_count, dp * tp * pp, config), references[tied])


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["block", pytest.param("full", marks=pytest.mark.slow)])
def test_what_backward_computes_again_finds_its_weights(
    ranks: RankPool, references: dict[bool, Outcome], recompute: str
) -> None:
    config = config_of(
        2,
        1,
        2,
        tied=True,
        kv_heads=1,
        num_layers=8,
        zero=3,
        residency="use",
        recompute=recompute,  # type: ignore[arg-type]
    )
    compare(ranks.run(train_and_count, 4, config), references[True])


def one_micro_batch(config: Config) -> Outcome:
    """m = 1 < p."""
    return train_and_count(config)


@pytest.mark.slow
def test_one_micro_batch(ranks: RankPool) -> None:
    reference = ranks.run(train, 1, config_of(1, 1, 1, tied=False, kv_heads=2, num_micro_batches=2))[0]
    config = config_of(2, 1, 2, tied=False, kv_heads=2, num_micro_batches=2, zero=3, residency="step")
    compare(ranks.run(one_micro_batch, 4, config), reference)


def losses_and_text(config: Config) -> tuple[list[float | None], list[int]]:
    """Losses of a step and of held-out text, twice; then a sample: plans that gather for themselves."""
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    losses = [
        trainer.step.run(0).loss,
        held_out_loss(trainer.state),
        trainer.step.run(1).loss,
        held_out_loss(trainer.state),
    ]
    return losses, sample(trainer.state, [10, 20, 30], 3)


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "residency"), [pytest.param(1, "auto", marks=pytest.mark.slow), (3, "use")])
def test_held_out_loss_and_samples(ranks: RankPool, zero: int, residency: str) -> None:
    want, text = ranks.run(losses_and_text, 1, config_of(1, 1, 1, tied=True, kv_heads=2))[0]
    config = config_of(2, 1, 2, tied=True, kv_heads=2, zero=zero, residency=residency)
    for losses, sampled in ranks.run(losses_and_text, 4, config):
        assert sampled == text
        assert losses == pytest.approx(want, rel=1e-9)
