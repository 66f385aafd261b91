"""Rung: gloo ranks. The engine broken on purpose: parity must go red for each mutation.

The verifier's own mutations (plans broken on purpose) are in plan/test_verify.py. Here the plan is right and a
part of the engine does not do what it says; `test_parity.compare` must notice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engine.parity import STEPS, Outcome, compare, config_of, outcome_of
from support.kernels.mutations import survivors
from support.ranks.rank_pool import RankPool

from tpengine.data import open_corpus
from tpengine.layers import IGNORED_LABEL
from tpengine.layout.parameters import EMBEDDING
from tpengine.runs.trainer import Trainer
from tpengine.training.step_batch import BatchReader


def scale_loss(trainer: Trainer, factor: float) -> None:
    read = trainer.step.reader.read
    trainer.step.reader.read = lambda step: replace(read(step), loss_scale=read(step).loss_scale * factor)  # type: ignore[method-assign]


def loss_scaled_by_a_thousandth(trainer: Trainer) -> None:
    scale_loss(trainer, 1.001)


def loss_not_divided_by_micro_batches(trainer: Trainer) -> None:
    scale_loss(trainer, trainer.state.part.config.train.num_micro_batches)


def mean_of_micro_batch_means(trainer: Trainer) -> None:
    """The classic: every micro-batch weighs the same however many of its labels are ignored."""
    weighted = trainer.step.batch.loss

    def loss(logits: torch.Tensor, microbatch: int) -> torch.Tensor:
        batch = trainer.step.batch.step
        valid = int((batch.given.labels[microbatch] != IGNORED_LABEL).sum())
        total = trainer.state.part.config.train.num_micro_batches * trainer.state.rank.mesh.shape.dp
        trainer.step.batch.step = replace(batch, loss_scale=torch.tensor(1 / (valid * total), dtype=torch.float64))
        value = weighted(logits, microbatch)
        trainer.step.batch.step = batch
        return value

    trainer.step.batch.loss = loss  # type: ignore[method-assign]


def reduce_dropped(trainer: Trainer) -> None:
    """One bucket is not summed over its ranks."""
    reduce = trainer.state.buckets.reduce
    first = min(trainer.state.buckets.flat)
    done = type("Done", (), {"wait": lambda self: None})()
    trainer.state.buckets.reduce = lambda i: done if i == first else reduce(i)  # type: ignore[method-assign]


def norms_not_summed_over_tp(trainer: Trainer) -> None:
    reduce = trainer.state.buckets.reduce
    layouts = trainer.state.part.layout.buckets_of(trainer.state.rank.mesh.at.pp)
    dp = trainer.state.rank.comms.dp
    trainer.state.buckets.reduce = lambda i: (  # type: ignore[method-assign]
        dp.start_all_reduce(trainer.state.buckets.flat[i]) if layouts[i].reduce_over == ("dp", "tp") else reduce(i)
    )


def replicated_kv_not_summed(trainer: Trainer) -> None:
    reduce = trainer.state.buckets.reduce
    layouts = trainer.state.part.layout.buckets_of(trainer.state.rank.mesh.at.pp)
    dp = trainer.state.rank.comms.dp
    trainer.state.buckets.reduce = lambda i: (  # type: ignore[method-assign]
        dp.start_all_reduce(trainer.state.buckets.flat[i]) if layouts[i].reduce_over == ("dp", "replica") else reduce(i)
    )


def bucket_reduced_before_its_last_contribution(trainer: Trainer) -> None:
    """One contribution to each bucket is counted before it is made."""
    arm, contributed = trainer.state.buckets.arm, trainer.state.buckets.contributed

    def arm_early(order: Sequence[int], on_start: Callable[[int], None] | None = None) -> None:
        arm(order, on_start)
        for index in order:
            contributed(index)

    trainer.state.buckets.arm = arm_early  # type: ignore[method-assign]


def previous_gradient_received(trainer: Trainer) -> None:
    """Micro-batch 3 receives the gradient of micro-batch 2, as with two receives in the wrong order."""
    take = trainer.step.stages[trainer.state.rank.mesh.at.pp].take_input_grad
    held: dict[int, torch.Tensor] = {}

    def swapped(microbatch: int) -> torch.Tensor:
        held[microbatch] = take(microbatch)
        return held[microbatch if microbatch < 3 else 2]

    trainer.step.stages[trainer.state.rank.mesh.at.pp].take_input_grad = swapped  # type: ignore[method-assign]


def layer_dropped(trainer: Trainer) -> None:
    if "3" in trainer.state.model.layers:
        trainer.state.model.layers["3"].forward = lambda x, seq: x  # type: ignore[method-assign]


def tie_forgotten(trainer: Trainer) -> None:
    trainer.step.executor.handlers = {
        **trainer.step.executor.handlers,
        next(k for k in trainer.step.executor.handlers if k.name == "TIE_REDUCE"): lambda _: None,
    }


def tied_copy_counted_in_the_norm(trainer: Trainer) -> None:
    if trainer.state.rank.mesh.at.pp > 0 and EMBEDDING in trainer.state.gradients.of:
        trainer.step.norm.owned.append((0, trainer.state.gradients.of[EMBEDDING]))


def replicated_norms_counted_twice(trainer: Trainer) -> None:
    trainer.step.norm.owned[:] = enumerate(trainer.state.gradients.of.values())


def gradients_not_zeroed(trainer: Trainer) -> None:
    trainer.state.buckets.zero = lambda: None  # type: ignore[method-assign]


def weights_differ_between_shards(trainer: Trainer) -> None:
    """Every rank draws its shard as if it were the first."""
    with torch.no_grad():
        for parameter in trainer.state.model.parameters():
            if parameter.dim() == 2 and trainer.state.rank.mesh.at.tp == 1:
                parameter.mul_(1 + 1e-6)


def data_order_ignores_the_replica(trainer: Trainer) -> None:
    first = replace(trainer.state.rank.mesh, at=replace(trainer.state.rank.mesh.at, dp=0))
    ends = trainer.state.part.layout.ranks[0], trainer.state.part.layout.ranks[-1]
    trainer.step.reader = BatchReader(
        trainer.state.part.config, trainer.state.part.corpus.train, first, ends, trainer.state.rank.device
    )


def positions_shifted(trainer: Trainer) -> None:
    """Sequences are regrouped with the wrong length after the gather."""
    half = trainer.state.part.config.train.seq_len // 2
    forward = trainer.state.model.forward
    trainer.state.model.forward = lambda x, seq, chunk: forward(x, half, chunk)  # type: ignore[method-assign]


# mutation -> the layout (dp, tp, pp) that can show it
MUTATIONS: dict[Callable[[Trainer], None], tuple[int, int, int]] = {
    loss_scaled_by_a_thousandth: (1, 2, 1),
    loss_not_divided_by_micro_batches: (1, 1, 2),
    mean_of_micro_batch_means: (2, 1, 1),
    reduce_dropped: (2, 1, 1),
    norms_not_summed_over_tp: (1, 2, 1),
    replicated_kv_not_summed: (1, 2, 1),
    bucket_reduced_before_its_last_contribution: (2, 1, 1),
    previous_gradient_received: (1, 1, 2),
    layer_dropped: (1, 1, 2),
    tie_forgotten: (1, 1, 2),
    tied_copy_counted_in_the_norm: (1, 1, 2),
    replicated_norms_counted_twice: (1, 2, 1),
    gradients_not_zeroed: (1, 1, 2),
    weights_differ_between_shards: (1, 2, 1),
    data_order_ignores_the_replica: (2, 1, 1),
    positions_shifted: (1, 2, 1),
}


def train_broken(config: Any, mutation: str) -> Outcome:
    trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    globals()[mutation](trainer)
    return outcome_of(trainer)


# By default two mutations of one layout, with its control.
@pytest.mark.parametrize(
    "mutations",
    [(reduce_dropped, data_order_ignores_the_replica), pytest.param(tuple(MUTATIONS), marks=pytest.mark.slow)],
    ids=["two", "all"],
)
def test_every_mutation_turns_parity_red(
    ranks: RankPool,
    count_mutations: Callable[[str, int, int], None],
    mutations: tuple[Callable[[Trainer], None], ...],
) -> None:
    (reference,) = ranks.run(train_broken, 1, config_of(1, 1, 1, tied=True, kv_heads=1), "no_mutation")
    layouts = {mutation.__name__: MUTATIONS[mutation] for mutation in mutations}

    def outcomes(mutation: str, layout: tuple[int, int, int]) -> list[Outcome]:
        config = config_of(*layout, tied=True, kv_heads=1)
        return ranks.run(train_broken, math.prod(layout), config, mutation)

    for layout in set(layouts.values()):
        compare(outcomes("no_mutation", layout), reference)
    unnoticed = survivors(layouts, lambda name: outcomes(name, layouts[name]), lambda got: compare(got, reference))
    count_mutations("the engine (parity)", len(layouts) - len(unnoticed), len(layouts))
    assert not unnoticed, f"parity did not notice {unnoticed} in {STEPS} steps"


def no_mutation(trainer: Trainer) -> None:
    """The engine as it is: the same programs must be green without a mutation."""
