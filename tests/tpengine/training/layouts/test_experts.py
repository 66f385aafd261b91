"""Rung: gloo ranks. Experts that ranks share out (parallel.ep): every layout trains to what one process trains to.

The layer is a loop (tests/support/architectures/looped_layer.py); what is proven is where experts lie, how their
gradients are summed, counted and clipped, what replicas own of them, and what a checkpoint holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import CountMutations
from support.architectures.looped_experts import permit_looped, with_experts
from support.engine.parity import Outcome, compare, config_of, outcome_of, whole_weights
from support.engine.resuming import resumed
from support.kernels.mutations import survivors
from support.ranks.rank_pool import RankPool
from tpkernels.exchange.communicator import Communicator

from tpengine.checkpoint.resume import checkpoints_of, state_of
from tpengine.checkpoint.save import Saver
from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.runs.trainer import Trainer
from tpengine.training.checkpoint_blocks import blocks_of
from tpengine.training.gradient_norm import GradientNorm
from tpengine.training.state_check import check_finite, check_replicas

CPU = torch.device("cpu")
SAVED, STEPS = 2, 3


def of(dp: int, tp: int, pp: int, ep: int, zero: int = 0, num_experts: int = 8) -> Config:
    return with_experts(config_of(dp, tp, pp, tied=False, kv_heads=4, num_layers=2, zero=zero), ep, num_experts)


def num_ranks(config: Config) -> int:
    parallel = config.parallel
    assert parallel.dp and parallel.tp and parallel.pp
    return parallel.dp * parallel.tp * parallel.pp


def made(config: Config) -> Trainer:
    permit_looped()
    return Trainer(config, open_corpus(config), CPU)


def train(config: Config) -> Outcome:
    trainer = made(config)
    outcome = outcome_of(trainer)
    check_finite(trainer.state)
    check_replicas(trainer.state, STEPS)
    return outcome


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> Callable[[int], Outcome]:
    """One process's outcome, by the number of experts."""
    return functools.cache(lambda num_experts: ranks.run(train, 1, of(1, 1, 1, 1, 0, num_experts))[0])


# dp, tp, pp, ep, zero, experts. ep is tp; tp times a divisor of dp; all ranks of a stage.
LAYOUTS = [
    (1, 2, 1, 2, 0, 8),
    (4, 1, 1, 2, 3, 8),
    (2, 2, 1, 4, 2, 8),
    *(
        pytest.param(*layout, marks=pytest.mark.slow)
        for layout in [
            (1, 2, 1, 1, 0, 8),
            (2, 1, 1, 2, 0, 8),
            (2, 2, 1, 2, 3, 8),
            (2, 2, 1, 4, 0, 8),
            (2, 2, 1, 4, 3, 8),
            (4, 1, 1, 2, 0, 8),
            (4, 1, 1, 2, 1, 8),
            (4, 1, 1, 2, 2, 8),
            (4, 1, 1, 4, 1, 8),
            (2, 1, 2, 2, 3, 8),
            (1, 2, 2, 2, 0, 8),
            (4, 2, 1, 4, 3, 8),
            (2, 2, 2, 4, 1, 8),
            (4, 2, 1, 8, 0, 8),
        ]
    ),
]


@pytest.mark.parametrize(("dp", "tp", "pp", "ep", "zero", "num_experts"), LAYOUTS)
def test_shared_experts_train_as_in_one_process(
    ranks: RankPool,
    alone: Callable[[int], Outcome],
    dp: int,
    tp: int,
    pp: int,
    ep: int,
    zero: int,
    num_experts: int,
) -> None:
    config = of(dp, tp, pp, ep, zero, num_experts)
    compare(ranks.run(train, num_ranks(config), config), alone(num_experts))


def train_and_save(config: Config, run_dir: str) -> list[str]:
    trainer = made(config)
    for step in range(SAVED):
        trainer.step.run(step)
    blocks = blocks_of(trainer.state)
    saver = Saver(checkpoints_of(run_dir), keep=2)
    fingerprint = trainer.state.part.corpus.fingerprint()
    saver.save(SAVED, blocks, state_of(config, fingerprint, SAVED, trainer.state.num_updates))
    assert saver.wait() is None
    return list(blocks)


def go_on(config: Config, run_dir: str) -> Outcome:
    permit_looped()
    trainer = resumed(config, run_dir, SAVED)
    numbers = [(result.loss, result.grad_norm) for result in map(trainer.step.run, range(SAVED, STEPS))]
    with whole_weights(trainer):
        pieces, held = trainer.state.model.pieces, trainer.state.model.held
        return numbers, {name: (pieces[name].block[0], weight.detach().clone()) for name, weight in held.items()}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, 2, 1, 4, 1), (1, 2, 1, 1, 0)),
        *(
            pytest.param(*change, marks=pytest.mark.slow)
            for change in [
                ((1, 2, 1, 1, 0), (2, 2, 1, 4, 3)),
                ((4, 1, 1, 2, 3), (1, 2, 2, 2, 0)),
                ((2, 2, 1, 4, 0), (4, 1, 1, 2, 2)),
            ]
        ),
    ],
)
def test_a_run_goes_on_with_experts_shared_out_otherwise(
    ranks: RankPool,
    alone: Callable[[int], Outcome],
    tmp_path: Path,
    first: tuple[int, int, int, int, int],
    second: tuple[int, int, int, int, int],
) -> None:
    ranks.run(train_and_save, num_ranks(of(*first)), of(*first), str(tmp_path))
    numbers, weights = alone(8)
    compare(ranks.run(go_on, num_ranks(of(*second)), of(*second), str(tmp_path)), (numbers[SAVED:], weights))


def scaled_experts(trainer: Trainer, factor: float) -> None:
    gradients, pieces = trainer.state.gradients, trainer.state.model.pieces
    finish = gradients.finish

    def finished() -> None:
        finish()
        for name, gradient in gradients.of.items():
            if ".experts." in pieces[name].spec.name:
                gradient.mul_(factor)

    gradients.finish = finished  # type: ignore[method-assign]


def experts_gradients_times_ep(trainer: Trainer) -> None:
    scaled_experts(trainer, trainer.state.rank.mesh.shape.ep)


def experts_gradients_divided_by_ep(trainer: Trainer) -> None:
    scaled_experts(trainer, 1 / trainer.state.rank.mesh.shape.ep)


def a_norm_for_each_group(trainer: Trainer) -> None:
    """Each group of ranks with all experts clips by a norm of its own."""
    trainer.step._replicas_differ = False


def experts_counted_by_every_replica(trainer: Trainer) -> None:
    state, pieces = trainer.state, trainer.state.model.pieces
    counted = {
        name: gradient
        for name, gradient in state.gradients.of.items()
        if pieces[name].spec.ep or state.copy_of(name)[0] == 0
    }
    trainer.step.norm = GradientNorm(state.model, counted, None, exact=False, device=CPU)


def experts_not_summed_over_replicas(trainer: Trainer) -> None:
    buckets, alone = trainer.state.buckets, Communicator(None)
    for index in buckets.flat:
        if buckets[index].axes == ("edp",):
            buckets[index].comm = alone


def no_mutation_of_experts(trainer: Trainer) -> None:
    """The engine as it is: the same programs must be green without a mutation."""


MUTATIONS = [
    experts_gradients_times_ep,
    experts_gradients_divided_by_ep,
    a_norm_for_each_group,
    experts_counted_by_every_replica,
    experts_not_summed_over_replicas,
]


def train_broken(config: Config, mutation: str) -> Outcome:
    trainer = made(config)
    globals()[mutation](trainer)
    return outcome_of(trainer)


@pytest.mark.slow
def test_every_mutation_of_experts_turns_parity_red(
    ranks: RankPool, alone: Callable[[int], Outcome], count_mutations: CountMutations
) -> None:
    config, names = of(4, 1, 1, 2), [mutation.__name__ for mutation in MUTATIONS]

    def outcomes(name: str) -> list[Outcome]:
        return ranks.run(train_broken, 4, config, name)

    compare(outcomes("no_mutation_of_experts"), alone(8))
    unnoticed = survivors(names, outcomes, lambda got: compare(got, alone(8)))
    count_mutations("experts shared out (parity)", len(names) - len(unnoticed), len(names))
    assert not unnoticed, f"parity did not notice {unnoticed}"
