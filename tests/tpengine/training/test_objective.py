"""Rung: gloo ranks. A loss and metrics of a user's own, in every layout as by hand on one process in float64.

The loss uses everything that an output offers (support/engine/own_loss.py); the loop by hand is plain torch. Loss,
gradient norm, metrics, the held-out ones, and after the steps every weight agree to 1e-9.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.engine.own_loss import (
    HIDDEN,
    OWN,
    Found,
    by_engine,
    by_hand,
    evaluated,
    hidden_by_hand,
    hidden_loss,
    numbers_by_hand,
)
from support.engine.parity import compare, config_of
from support.mixtures import write_mixture
from support.ranks.rank_pool import RankPool
from torch import Tensor
from tpkernels.exchange.communicator import Communicator

from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.layers.collectives import gather
from tpengine.model.parts import FastParts
from tpengine.model.transformer import Transformer
from tpengine.runs.evaluation import held_out_losses
from tpengine.runs.trainer import Trainer
from tpengine.training import last_output
from tpengine.training.last_output import LastOutput
from tpengine.training.objective import MicroBatch, NextToken, Objective, resolved
from tpengine.training.planned_run import RunError
from tpengine.training.step_loss import TrainingBatch

CPU = torch.device("cpu")
STEPS = 2


def small(dp: int, tp: int, pp: int, **parallel: Any) -> Config:
    return evaluated(config_of(dp, tp, pp, tied=True, kv_heads=2, num_layers=2, **parallel))


@pytest.fixture(scope="module")
def reference(ranks: RankPool) -> Found:
    """Plain torch's."""
    return cast(Found, ranks.run(by_hand, 1, small(1, 1, 1), STEPS)[0])


def test_one_process_is_the_loop_by_hand(ranks: RankPool, reference: Found) -> None:
    compare(ranks.run(by_engine, 1, small(1, 1, 1), STEPS), reference)


GRID = [
    small(1, 2, 1),
    small(1, 1, 2, recompute="full"),
    small(2, 1, 1, zero=3),
]


@pytest.mark.parametrize("layout", range(len(GRID)), ids=["tp", "pp, full recomputation", "dp, ZeRO 3"])
def test_every_axis_is_as_by_hand(ranks: RankPool, reference: Found, layout: int) -> None:
    compare(ranks.run(by_engine, 2, GRID[layout], STEPS), reference)


def test_a_loss_of_hidden_states_alone_trains(ranks: RankPool) -> None:
    """Replicas wait for the gradient of a head that has no part in the loss."""

    def untied(dp: int, zero: int = 0) -> Config:
        return evaluated(config_of(dp, 1, 1, tied=False, kv_heads=2, num_layers=1, zero=zero))

    (by_one,) = ranks.run(by_hand, 1, untied(1), STEPS, hidden_by_hand)
    for zero in (0, 3):
        compare(ranks.run(by_engine, 2, untied(2, zero), STEPS, HIDDEN), by_one)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-h1", "zbv"])
def test_all_axes_together(ranks: RankPool, zero: int, schedule: str) -> None:
    one = evaluated(config_of(1, 1, 1, tied=True, kv_heads=2, num_layers=4))
    config = evaluated(config_of(2, 2, 2, tied=True, kv_heads=2, num_layers=4, zero=zero, schedule=schedule))
    compare(ranks.run(by_engine, 8, config, STEPS), ranks.run(by_hand, 1, one, STEPS)[0])


def exact(config: Config) -> Config:
    return replace(config, train=replace(config.train, reduction="exact", dtype="float32"))


@pytest.mark.slow
def test_exact_mode_gives_the_same_bits_in_every_layout(ranks: RankPool) -> None:
    (numbers, _), *_ = ranks.run(by_engine, 1, exact(small(1, 1, 1)), STEPS)
    for layout in ((2, 2, 1), (1, 2, 2), (2, 1, 2)):
        for zero in (0, 3):
            for found, _ in ranks.run(by_engine, 4, exact(small(*layout, zero=zero)), STEPS):
                assert found == numbers, layout


def half_precision(config: Config) -> tuple[list[tuple[float, float, float | None]], list[float]]:
    config = replace(config, train=replace(config.train, dtype="float16"))
    trainer = Trainer(config, open_corpus(config), CPU, objective=OWN)
    results = [trainer.step.run(step) for step in range(4)]
    return [(result.loss, result.grad_norm, result.loss_scale) for result in results], [
        result.metrics["entropy"] for result in results if not result.skipped
    ]


@pytest.mark.slow
def test_a_scaled_loss_has_the_norm_of_an_unscaled_one(ranks: RankPool, reference: Found) -> None:
    for found, entropies in ranks.run(half_precision, 2, small(1, 2, 1)):
        first = next(numbers for numbers in found if torch.isfinite(torch.tensor(numbers[1])))
        assert first[2] is not None and first[2] > 1
        assert first[:2] == pytest.approx(reference[0][0][:2], rel=2e-2)
        assert entropies[0] == pytest.approx(reference[0][0][2], rel=2e-2)


def mixed(config: Config) -> dict[str, float]:
    trainer = Trainer(config, open_corpus(config), CPU, objective=OWN)
    found = held_out_losses(trainer.state, None, trainer.objective)
    assert found.of_all is not None
    of_source = {f"loss/{name}": loss for name, loss in found.of_source.items()}
    return {"loss": found.of_all, **of_source, **found.metrics}


def mixed_by_hand(config: Config) -> dict[str, float]:
    """Of each source its own samples alone; of all, the mean by the sources' shares."""
    net = Transformer(FastParts(config.model, Communicator(None), dtype=torch.float64))
    net.initialise(config.train.seed)
    held_out, found = open_corpus(config).held_out, dict[str, float]()
    numbers = np.arange(config.train.eval_samples)
    tokens, labels = (torch.from_numpy(of) for of in held_out.read(numbers))
    sources, names = torch.from_numpy(held_out.place(numbers)[0]), ("loss", "entropy", "right", "logprob")
    for place, source in enumerate(held_out.names):
        of = sources == place
        values = numbers_by_hand(net, tokens[of], labels[of], config.model.vocab_size)
        found |= {
            f"{name}/{source}": float(total) / float(count)
            for name, total, count in zip(names, values[::2], values[1::2], strict=True)
        }
    for name in names:
        of_sources = [found[f"{name}/{source}"] for source in held_out.names]
        found[name] = float(np.average(of_sources, weights=held_out.shares))
    return found


def test_a_source_of_a_mixture_is_evaluated_alone(ranks: RankPool, tmp_path: Path) -> None:
    """Its samples lie beside others' in a micro-batch, and the last one is filled up with what does not count."""
    mixture = write_mixture(tmp_path, [[900] * 2, [700] * 2], [3, 1], vocab_size=250)
    one, two = (
        replace(config, data=replace(config.data, path="", mixture=str(mixture), held_out_fraction=0.3))
        for config in (small(1, 1, 1), small(1, 2, 1))
    )
    (want,) = ranks.run(mixed_by_hand, 1, one)
    for found in ranks.run(mixed, 2, two):
        assert found == pytest.approx(want, rel=1e-9)


def plain(config: Config, metrics: bool) -> list[tuple[float, float]]:
    objective = Objective(metrics=OWN.metrics) if metrics else None
    trainer = Trainer(config, open_corpus(config), CPU, objective=objective)
    return [(result.loss, result.grad_norm) for result in map(trainer.step.run, range(2))]


def test_metrics_change_no_bit_of_training(ranks: RankPool) -> None:
    config = small(1, 2, 1)
    assert ranks.run(plain, 2, config, True) == ranks.run(plain, 2, config, False)


def smoothed_by_hand(config: Config) -> float:
    """The first loss of drawn weights, without the engine's loss."""
    tokens, labels = (torch.from_numpy(of) for of in open_corpus(config).train.batch(0, 8))
    net = Trainer(config, open_corpus(config), CPU).state.model
    z = net(tokens.flatten(), config.train.seq_len)[:, : config.model.vocab_size]
    known = labels.flatten()
    losses = torch.nn.functional.cross_entropy(z, known, label_smoothing=config.train.label_smoothing, reduction="none")
    valid = known != -100
    return float((losses + config.train.z_loss * z.logsumexp(1).square())[valid].mean())


def first_loss(config: Config) -> float:
    return Trainer(config, open_corpus(config), CPU).step.run(0).loss


def test_settings_of_next_token_loss(ranks: RankPool) -> None:
    def with_settings(config: Config) -> Config:
        return replace(config, train=replace(config.train, label_smoothing=0.2, z_loss=0.01))

    (want,) = ranks.run(smoothed_by_hand, 1, with_settings(small(1, 1, 1)))
    for found in ranks.run(first_loss, 2, with_settings(small(1, 2, 1))):
        assert found == pytest.approx(want, rel=1e-12)
    for settings in ({"z_loss": 0.1}, {"label_smoothing": 0.1}):
        for objective in (OWN, Objective(NextToken())):
            with pytest.raises(ValueError, match="which a loss of your own replaces: leave them 0"):
                resolved(objective, replace(small(1, 1, 1).train, **settings))  # type: ignore[arg-type]


def test_a_metric_is_no_part_of_a_graph() -> None:
    """Though it returns what the loss has kept, which needs a gradient: the sums would hold every step's graph."""
    kept = list[Tensor]()

    def loss(output: LastOutput, batch: MicroBatch) -> Tensor:
        kept.append(hidden_loss(output, batch))
        return kept[0]

    z, ids = torch.zeros(4, 8, requires_grad=True), torch.arange(4)
    output = LastOutput(z, 8, Communicator(None), 4, hidden=z[:, :3])
    objective = Objective(loss, metrics={"m": lambda output, batch: (kept[0], kept[0])})
    found = objective.evaluate(output, MicroBatch(ids, ids), 4.0)
    assert found.loss.requires_grad and found.metrics == ((12.0, 12.0),)
    assert not any(cast(Tensor, part).requires_grad for part in found.metrics[0])


def rounding(output: LastOutput, batch: MicroBatch) -> float:
    """What is left where the parts of a sum cancel: other noise on every rank."""
    return 1e-7 * torch.distributed.get_rank()


def cancelled(config: Config) -> float:
    trainer = Trainer(config, open_corpus(config), CPU, objective=Objective(metrics={"m": rounding}))
    return trainer.step.run(0).metrics["m"]


def test_a_metric_whose_parts_cancel_may_differ_by_rounding(ranks: RankPool) -> None:
    for found in ranks.run(cancelled, 2, small(1, 2, 1)):
        assert abs(found) < 1e-7


# What is wrong with an objective ends the run at its first step, on all ranks by the same line.


def shape(output: LastOutput, batch: MicroBatch) -> Tensor:
    return output.token_logprobs(batch.labels)


def detached(output: LastOutput, batch: MicroBatch) -> Tensor:
    return output.entropy().detach().sum()


def raising(output: LastOutput, batch: MicroBatch) -> Tensor:
    return output.entropy().sum() * batch.columns["reward"].sum()


def by_rank(output: LastOutput, batch: MicroBatch) -> Tensor:
    return (1 + 0.01 * torch.distributed.get_rank()) * output.entropy().sum()


def halved(output: LastOutput, batch: MicroBatch) -> Tensor:
    return output.entropy().bfloat16().sum()


def short(output: LastOutput, batch: MicroBatch) -> Tensor:
    return output.token_logprobs(batch.labels[1:]).sum()


def vector(output: LastOutput, batch: MicroBatch) -> Tensor:
    return output.entropy()


def metric_by_rank(output: LastOutput, batch: MicroBatch) -> float:
    return float(torch.distributed.get_rank())


def negative(batch: MicroBatch) -> float:
    return -1.0


def count_by_rank(batch: MicroBatch) -> float:
    return 1.0 + torch.distributed.get_rank()


def nothing(batch: MicroBatch) -> float:
    return 0.0


BAD: dict[str, tuple[Objective, str]] = {
    "shape": (Objective(shape), "a loss is one number, the sum over its micro-batch: got a tensor of shape (48,)"),
    "no gradient": (Objective(detached), "a loss must follow from the output by what autograd records"),
    "16 bits": (Objective(halved), "a loss is summed in at least 32 bits: got torch.bfloat16, which would round every"),
    "an error": (Objective(raising), "the loss raised KeyError: 'reward' (line "),
    "short labels": (Objective(short), "labels are one of each token of the micro-batch: got (47,) for 48 tokens"),
    "by rank": (Objective(by_rank), "all tp ranks must compute the same: the loss is "),
    "metric": (
        Objective(metrics={"m": vector}),
        "a metric is one number, a sum, or a sum and a count: m gave a tensor",
    ),
    "metric by rank": (
        Objective(metrics={"m": metric_by_rank}),
        "all tp ranks must compute the same: metric m is 0 on",
    ),
    "count": (Objective(count=negative), "a count is a finite number of at least 0: got -1"),
    "count by rank": (
        Objective(count=count_by_rank),
        "the ranks of a replica must count alike: in step 1 rank 0 counts 4",
    ),
    "count 0": (Objective(count=nothing), "a step's count must be above 0: that of step 1 is 0"),
}


def fails(config: Config, names: tuple[str, ...]) -> list[str]:
    found = []
    for name in names:
        trainer = Trainer(config, open_corpus(config), CPU, objective=BAD[name][0])
        with pytest.raises(RunError) as raised:
            trainer.step.run(0)
        found.append(str(raised.value))
    return found


def test_what_is_wrong_with_an_objective_is_said_by_all_ranks(ranks: RankPool) -> None:
    config = config_of(1, 2, 1, tied=False, kv_heads=2, num_layers=1)
    found = ranks.run(fails, 2, config, tuple(BAD))
    assert found[0] == found[1]
    for (_, begin), line in zip(BAD.values(), found[0], strict=True):
        assert line.removeprefix("the loss raised ValueError: ").startswith(begin) and "\n" not in line
        assert "step 1" in line


def test_a_loss_of_a_last_stage_alone_fails_on_all_stages(ranks: RankPool) -> None:
    found = ranks.run(fails, 2, config_of(1, 1, 2, tied=False, kv_heads=2, num_layers=2), ("an error", "metric"))
    assert found[0] == found[1]


def test_a_stage_that_reads_no_text_says_the_same(ranks: RankPool) -> None:
    config = config_of(1, 1, 3, tied=False, kv_heads=2, num_layers=3)
    first, middle, last = ranks.run(fails, 3, config, ("count 0", "count"))
    assert first == middle == last and first[0].startswith(BAD["count 0"][1])


def test_names_that_no_row_can_have_are_refused() -> None:
    with pytest.raises(ValueError, match="a metric needs a name of printable characters without /: got 'a/b'"):
        resolved(Objective(metrics={"a/b": vector}), small(1, 1, 1).train)


# Mutations: what parity must notice.


def metric_once_per_tp_rank(patch: pytest.MonkeyPatch) -> None:
    """Every tp rank adds its metrics to the sum."""
    sums = TrainingBatch.sum_over_replicas

    def counted(self: TrainingBatch, dp: Any) -> tuple[Tensor, Tensor]:
        loss, means = sums(self, dp)
        return loss, means * self._tp.size

    patch.setattr(TrainingBatch, "sum_over_replicas", counted)


def divided_by_own_count(patch: pytest.MonkeyPatch) -> None:
    """Each micro-batch's loss is a mean, as if all had the same count."""
    evaluate = Objective.evaluate

    def mean(self: Objective, output: LastOutput, batch: MicroBatch, count: float) -> Any:
        found = evaluate(self, output, batch, count)
        return found._replace(loss=found.loss / count * 100)

    patch.setattr(Objective, "evaluate", mean)


def gradient_of_each_rank(patch: pytest.MonkeyPatch) -> None:
    """Hidden states' gradient is summed over tp ranks, though each has the whole."""
    patch.setattr(last_output, "whole_rows", gather)


MUTATIONS = {
    "metric": metric_once_per_tp_rank,
    "count": divided_by_own_count,
    "gradient": gradient_of_each_rank,
}


def broken(config: Config, name: str) -> Found:
    with pytest.MonkeyPatch.context() as patch:
        MUTATIONS[name](patch)
        return by_engine(config, 1)


@pytest.mark.parametrize("name", MUTATIONS)
def test_parity_notices_mutations(ranks: RankPool, name: str) -> None:
    reference = ranks.run(by_engine, 2, small(1, 2, 1), 1)[0]
    found = ranks.run(broken, 2, small(1, 2, 1), name)[0]
    numbers = zip(reference[0][0], found[0][0], strict=True)
    assert any(number != pytest.approx(other, rel=1e-9) for number, other in numbers)
