"""Rung: gloo ranks. ZeRO broken on purpose, as engines have been: every mutation turns parity red.

What only a plan can get wrong is broken in tests/tpengine/plan/test_verify_mutations.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.engine.parity import STEPS, Outcome, compare, config_of, outcome_of
from support.kernels.mutations import survivors
from support.ranks.rank_pool import RankPool
from torch import Tensor
from tpkernels.exchange.pending import Work

from tpengine.data import open_corpus
from tpengine.runs.trainer import Trainer


def around_wait(trainer: Trainer, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Make the slice of a bucket something else, of what it was before a sum and is after it."""
    buckets = trainer.state.buckets
    wait = buckets.wait

    def changed(index: int) -> Work:
        before = buckets[index].own.clone()
        work = wait(index)
        buckets[index].own.copy_(change(before, buckets[index].own.clone()))
        return work

    buckets.wait = changed  # type: ignore[method-assign]


def only_the_last_micro_batch_counts(trainer: Trainer) -> None:
    around_wait(trainer, lambda before, after: after - before)


def added_up_twice(trainer: Trainer) -> None:
    around_wait(trainer, lambda before, after: 2 * after - before)


def scaled_again_on_each_stage(trainer: Trainer) -> None:
    factor = 1 / (1 + trainer.state.rank.mesh.at.pp)
    around_wait(trainer, lambda before, after: before + factor * (after - before))


def sums_in_bfloat16(trainer: Trainer) -> None:
    around_wait(trainer, lambda before, after: after.bfloat16().to(after.dtype))


def not_reduced(trainer: Trainer) -> None:
    """Each replica keeps its own contribution to its slice."""
    comm = trainer.state.rank.comms.dp

    def own(x: Tensor, out: Tensor, **_: Any) -> Work:
        out.copy_(x.view(comm.size, -1)[comm.rank])
        return comm.start_all_reduce(torch.zeros(1))

    comm.start_reduce_scatter = own  # type: ignore[method-assign]


def last_steps_weights_are_used(trainer: Trainer) -> None:
    """A gather that brings what was there before the update."""
    weights = trainer.step.moves.weights
    gather, old = weights.gather, {index: own.clone() for index, own in weights.own.items()}

    def late(index: int) -> None:
        new = weights.own[index].clone()
        weights.own[index].copy_(old[index])
        gather(index)
        while not weights.is_complete(index):
            time.sleep(1e-4)
        weights.own[index].copy_(new)
        old[index] = new

    weights.gather = late  # type: ignore[method-assign]


def step_counters_apart(trainer: Trainer) -> None:
    """One replica corrects the bias of other moments."""
    if trainer.state.rank.mesh.at.dp:
        trainer.state.num_updates = 1


def norms_not_summed_over_tp(trainer: Trainer) -> None:
    trainer.state.gradients.finish = lambda: None  # type: ignore[method-assign]


def norm_of_own_slices_alone(trainer: Trainer) -> None:
    """Replicas clip by different norms, of what each owns."""
    reduce, comm = trainer.state.rank.comms.dp.all_reduce_, trainer.state.rank.comms.dp

    def forgotten(x: Tensor) -> Tensor:
        return x if len(x) == trainer.step.norm.num_figures + 1 else reduce(x)

    comm.all_reduce_ = forgotten  # type: ignore[method-assign]


def no_mutation(trainer: Trainer) -> None:
    """The engine as it is: the same programs must be green without a mutation."""


# mutation -> the layout (dp, tp, pp) and the stage that can show it
MUTATIONS: dict[Callable[[Trainer], None], tuple[tuple[int, int, int], int]] = {
    only_the_last_micro_batch_counts: ((2, 1, 1), 2),
    added_up_twice: ((2, 1, 1), 2),
    scaled_again_on_each_stage: ((2, 1, 2), 3),
    sums_in_bfloat16: ((2, 1, 1), 1),
    not_reduced: ((2, 1, 1), 3),
    last_steps_weights_are_used: ((2, 1, 1), 1),
    step_counters_apart: ((2, 1, 1), 2),
    norms_not_summed_over_tp: ((2, 2, 1), 3),
    norm_of_own_slices_alone: ((2, 1, 1), 2),
}


def train_broken(config: Any, mutation: str) -> Outcome:
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    globals()[mutation](trainer)
    return outcome_of(trainer)


# By default two mutations of one layout, with its control.
@pytest.mark.slow
@pytest.mark.parametrize(
    "mutations",
    [
        (only_the_last_micro_batch_counts, added_up_twice),
        pytest.param(tuple(MUTATIONS), marks=pytest.mark.slow),
    ],
    ids=["two", "all"],
)
def test_every_mutation_turns_parity_red(
    ranks: RankPool,
    count_mutations: Callable[[str, int, int], None],
    mutations: tuple[Callable[[Trainer], None], ...],
) -> None:
    (reference,) = ranks.run(train_broken, 1, config_of(1, 1, 1, tied=True, kv_heads=1), "no_mutation")
    places = {mutation.__name__: MUTATIONS[mutation] for mutation in mutations}

    def outcomes(mutation: str, layout: tuple[int, int, int], zero: int) -> list[Outcome]:
        config = config_of(*layout, tied=True, kv_heads=1, zero=zero)
        return ranks.run(train_broken, math.prod(layout), config, mutation)

    for place in set(places.values()):
        compare(outcomes("no_mutation", *place), reference)
    unnoticed = survivors(places, lambda name: outcomes(name, *places[name]), lambda got: compare(got, reference))
    count_mutations("ZeRO (parity)", len(places) - len(unnoticed), len(places))
    assert not unnoticed, f"parity did not notice {unnoticed} in {STEPS} steps"
