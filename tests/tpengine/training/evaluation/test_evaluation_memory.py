"""Rung: gloo ranks. A run that evaluates and samples holds at most what it holds without: no second copy of anything.

Counted is what torch allocates on the thread that trains (benchmarks/harness/allocations.py), with activations that are
small beside the weights: masters, moments, gradients, weights, and their copies for a CPU's matmuls.
"""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from support.engine.parity import config_of
from support.ranks.rank_pool import RankPool

from benchmarks.harness.allocations import Allocations
from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.runs import between_steps
from tpengine.runs.between_steps import Evaluation
from tpengine.runs.evaluation import HeldOutLoss
from tpengine.runs.trainer import Trainer
from tpengine.training.train_state import TrainState

CPU = torch.device("cpu")


def peak(config: Config, evaluates: bool) -> tuple[int, int]:
    """The most that this rank holds in its third step and what comes before and behind it, and its weights' bytes."""
    with Allocations() as counted:
        trainer = Trainer(config, open_corpus(config), CPU)
        evaluation = Evaluation(trainer.state, None, Console(file=io.StringIO()), lambda: None)

        def evaluate() -> None:
            if evaluates:
                assert evaluation.held_out_losses().of_all is not None
                evaluation.sample(1)

        for step in range(2):
            evaluate()
            trainer.step.run(step)
        with counted.here():
            evaluate()
            trainer.step.run(2)
            evaluate()
    weights = sum(parameter.numel() * parameter.element_size() for parameter in trainer.state.model.parameters())
    return counted.peak_bytes(), weights


def peak_with_a_copy(config: Config, evaluates: bool) -> tuple[int, int]:
    """The same where an evaluation computes with a copy of the weights."""
    real = between_steps.held_out_losses

    def copying(state: TrainState, *others: Any) -> HeldOutLoss:
        copies = [parameter.clone() for parameter in state.model.parameters()]
        assert copies
        return real(state, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(between_steps, "held_out_losses", copying)
        return peak(config, evaluates)


def config_for(layout: tuple[int, int, int], zero: int, hidden: int, reduction: Any) -> Config:
    config = config_of(*layout, tied=False, kv_heads=4, num_layers=2, zero=zero)
    model = replace(config.model, hidden_size=hidden, ffn_size=2 * hidden, vocab_size=256)
    sizes: dict[str, Any] = dict(seq_len=hidden // 2, micro_batch_size=1, num_micro_batches=2, dtype="float32")
    train = replace(config.train, **sizes, reduction=reduction, eval_micro_batches=2, sample_tokens=2)
    return replace(config, model=model, train=train)


def check(without: list[tuple[int, int]], with_evaluation: list[tuple[int, int]]) -> None:
    for rank, ((most, weights), (most_with, _)) in enumerate(zip(without, with_evaluation, strict=True)):
        assert most_with - most < weights / 4, f"rank {rank}: {most_with - most:,} bytes more, weights {weights:,}"


# Matrices of 256 columns are copied for a CPU's matmuls.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "zero", "hidden", "reduction"),
    [
        ((1, 2, 1), 0, 64, "fast"),
        ((1, 2, 1), 0, 256, "fast"),
        ((2, 1, 1), 3, 256, "fast"),
        ((1, 1, 2), 0, 64, "exact"),
        ((2, 1, 1), 3, 64, "exact"),
    ],
    ids=str,
)
def test_evaluating_and_sampling_hold_no_second_copy(
    ranks: RankPool, layout: tuple[int, int, int], zero: int, hidden: int, reduction: str
) -> None:
    config = config_for(layout, zero, hidden, reduction)
    check(*(ranks.run(peak, 2, config, evaluates) for evaluates in (False, True)))


@pytest.mark.slow
def test_an_evaluation_that_copies_the_weights_is_noticed(ranks: RankPool) -> None:
    config = config_for((1, 2, 1), 0, 64, "fast")
    with pytest.raises(AssertionError, match="bytes more"):
        check(*(ranks.run(peak_with_a_copy, 2, config, evaluates) for evaluates in (False, True)))
