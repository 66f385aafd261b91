"""Rung: gloo ranks. A step that leaps is skipped: by the bits of a run that never did it, in every layout, at no cost.

What only a GPU checks: that the comparison there waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.engine.exactness import CPU, assert_same_bits, exact_config, merge, num_ranks, train_steps
from support.engine.resuming import resumed
from support.engine.spike_program import scramble
from support.ranks.rank_pool import RankPool
from tpkernels.exchange.communicator import Communicator

from tpengine.checkpoint.resume import checkpoints_of, state_of
from tpengine.checkpoint.save import Saver
from tpengine.config import Config, validate
from tpengine.data import open_corpus
from tpengine.runs.trainer import Trainer
from tpengine.training.checkpoint_blocks import blocks_of
from tpengine.training.spikes import Limits

LEAP, STEPS = 7, 9
# The labels of one of four micro-batches are scrambled.
RULE = "skip 8 4"
MICRO_BATCH = 2


def config_for(dp: int, tp: int, pp: int, rule: str = RULE) -> Config:
    config = exact_config(dp, tp, pp, layers=2, steps=STEPS, dropout=0.0)
    model = replace(config.model, residual_dropout=0.1)
    train, optim = replace(config.train, spike=rule), replace(config.optim, lr=3e-2)
    return validate(replace(config, model=model, train=train, optim=optim), num_ranks(config))


def with_bad_labels() -> Callable[[], None]:
    each = config_for(1, 1, 1).train.micro_batch_size
    first = (LEAP * 4 + MICRO_BATCH) * each
    return scramble(f"{first}:{first + each}")


def until_the_leap(config: Config, run_dir: str) -> list[bool]:
    """Train, save before the leap; whether each step was judged to leap."""
    undo, trainer, found = with_bad_labels(), Trainer(config, open_corpus(config), CPU), []
    try:
        for step in range(STEPS):
            if step == LEAP:
                saver = Saver(checkpoints_of(run_dir), keep=2)
                state = state_of(config, trainer.state.part.corpus.fingerprint(), step, trainer.state.num_updates)
                saver.save(step, blocks_of(trainer.state), {**state, "spikes": trainer.state.spikes.state()})
                assert saver.wait() is None
            result = trainer.step.run(step)
            assert result.skipped == result.spiked
            found.append(result.spiked)
    finally:
        undo()
    return found


def rest(config: Config, run_dir: str, leaves_out: bool) -> Any:
    """The steps from the leap on; told beforehand to leave its step out, or not."""
    undo, trainer = with_bad_labels(), resumed(config, run_dir, LEAP)
    try:
        if not leaves_out:
            result = trainer.step.run(LEAP)
            assert result.spiked and trainer.state.num_updates == LEAP
        return train_steps(trainer, LEAP + 1, STEPS)
    finally:
        undo()


@pytest.mark.slow
def test_a_leap_is_skipped_with_the_bits_of_a_run_that_was_told_so(ranks: RankPool, tmp_path: Path) -> None:
    """By default test_spike_answers.py proves it of one rank."""
    run_dir = str(tmp_path)
    config = config_for(1, 1, 1)
    (found,) = ranks.run(until_the_leap, 1, config, run_dir)
    assert found == [step == LEAP for step in range(STEPS)]
    without = config_for(1, 1, 1, "")
    want = merge(without, ranks.run(rest, 1, without, run_dir, True))
    for layout in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2)):
        config = config_for(*layout)
        assert_same_bits(merge(config, ranks.run(rest, num_ranks(config), config, run_dir, False)), want)


COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "broadcast"),
    *("gather", "scatter", "send", "recv", "isend", "irecv", "barrier", "batch_isend_irecv", "all_to_all_single"),
)


def exchanges(config: Config) -> tuple[list[str], bool]:
    """What a step that is judged exchanges over groups and communicators, in its order; whether it leaps."""
    trainer, called = Trainer(config, open_corpus(config), CPU), []
    for step in range(3):
        trainer.step.run(step)
    assert (trainer.state.spikes.rule is None) == (trainer.state.spikes.limits(3, 0) == Limits())

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sizes = [tuple(x.shape) for x in args if hasattr(x, "shape")]
            called.append(f"{name} {sizes}")
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(dist, name, counted(name, getattr(dist, name)))
        for name, method in vars(Communicator).items():
            if callable(method) and not name.startswith("__"):
                patch.setattr(Communicator, name, counted(name, method))
        result = trainer.step.run(3)
    return called, result.spiked


def test_a_leap_is_judged_without_another_exchange(ranks: RankPool) -> None:
    """The same calls on the same sizes as in a run that judges nothing."""
    alike = [ranks.run(exchanges, 2, config_for(2, 1, 1, rule)) for rule in ("", "skip 1 4")]
    for without, judged in zip(*alike, strict=True):
        assert judged[0] == without[0]
        assert len(judged[0]) > 3 and any("all_reduce" in name for name in judged[0])
