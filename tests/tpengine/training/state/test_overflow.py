"""Rung: gloo ranks. In float16 a gradient that overflows on one rank is skipped by all of them, and the scale halves.

What only a GPU checks: that the fused AdamW's kernel leaves everything as it is there too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.engine.exactness import CPU, digests_of
from support.engine.parity import config_of
from support.engine.resuming import resumed
from support.ranks.rank_pool import RankPool
from torch import Tensor
from tpkernels.exchange.pending import Work

from tpengine.checkpoint.resume import checkpoints_of, state_of
from tpengine.checkpoint.save import Saver
from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.runs.skipped_steps import SkippedSteps
from tpengine.runs.trainer import Trainer
from tpengine.training.checkpoint_blocks import blocks_of
from tpengine.training.loss_scale import FIRST_SCALE, FLOOR
from tpengine.training.planned_run import RunError

OVERFLOW, STEPS = 2, 4
Digests = dict[Any, Any]


def half(dp: int, tp: int, pp: int, **parallel: Any) -> Config:
    config = config_of(dp, tp, pp, tied=True, kv_heads=1, num_layers=2, **parallel)
    return replace(config, train=replace(config.train, dtype="float16", steps=STEPS))


def spoiled(trainer: Trainer, rank: int) -> Trainer:
    """In one step one rank adds infinity to one gradient, in its first micro-batch."""
    if trainer.state.sliced is not None:
        return spoiled_slices(trainer, rank)
    after_backward = trainer.state.gradients.after_backward

    def spoil(chunk: int, microbatch: int, reduced: Any) -> None:
        after_backward(chunk, microbatch, reduced)
        if dist.get_rank() == rank and trainer.state.model.position.step == OVERFLOW and microbatch == 0:
            next(iter(trainer.state.buckets.gradients.values())).view(-1)[-1] = math.inf

    trainer.state.gradients.after_backward = spoil  # type: ignore[method-assign]
    return trainer


def spoiled_slices(trainer: Trainer, rank: int) -> Trainer:
    """The same where replicas own slices: in what the rank contributes to the first sum of that step."""
    comm, spoilt = trainer.state.rank.comms.dp, []
    reduce = comm.start_reduce_scatter

    def spoil(x: Tensor, out: Tensor, **options: Any) -> Work:
        if dist.get_rank() == rank and trainer.state.model.position.step == OVERFLOW and not spoilt:
            spoilt.append(x)
            x[0] = math.inf
        return reduce(x, out, **options)

    comm.start_reduce_scatter = spoil  # type: ignore[method-assign]
    return trainer


def state_digests(trainer: Trainer) -> Digests:
    return {key: found for key, found in digests_of(trainer).items() if key[2] != "gradient"}


def steps_of(trainer: Trainer, first: int) -> tuple[list[tuple[bool, bool, float | None]], Digests]:
    told = []
    for step in range(first, STEPS):
        before, num_updates = state_digests(trainer), trainer.state.num_updates
        result = trainer.step.run(step)
        told.append((result.skipped, result.overflowed, result.loss_scale))
        assert math.isfinite(result.loss)
        assert (state_digests(trainer) == before) == result.skipped == (trainer.state.num_updates == num_updates)
    return told, state_digests(trainer)


def save(trainer: Trainer, run_dir: str, num_steps: int) -> None:
    saver = Saver(checkpoints_of(run_dir), keep=2)
    state = state_of(
        trainer.state.part.config, trainer.state.part.corpus.fingerprint(), num_steps, trainer.state.num_updates
    )
    saver.save(num_steps, blocks_of(trainer.state), {**state, "loss_scale": trainer.state.loss_scale.state()})
    assert saver.wait() is None


def run_and_resume(
    config: Config, run_dir: str, rank: int
) -> list[tuple[list[tuple[bool, bool, float | None]], Digests]]:
    """One run; and the same, gone on with from before and from after the step that overflows."""
    outcomes = [steps_of(spoiled(Trainer(config, open_corpus(config), CPU), rank), 0)]
    for saved in (OVERFLOW, OVERFLOW + 1):
        path = f"{run_dir}/{saved}"
        trainer = spoiled(Trainer(config, open_corpus(config), CPU), rank)
        for step in range(saved):
            trainer.step.run(step)
        save(trainer, path, saved)
        outcomes.append(steps_of(spoiled(resumed(config, path, saved), rank), saved))
    return outcomes


@pytest.mark.parametrize(
    ("layout", "rank", "zero"),
    [
        ((1, 1, 2), 1, 0),
        *(pytest.param((2, 1, 2), 3, zero, marks=pytest.mark.slow) for zero in (1, 2, 3)),
        pytest.param((1, 2, 2), 3, 0, marks=pytest.mark.slow),
        pytest.param((2, 2, 1), 1, 0, marks=pytest.mark.slow),
        pytest.param((1, 1, 1), 0, 0, marks=pytest.mark.slow),
    ],
)
def test_one_ranks_overflow_is_skipped_by_all(
    ranks: RankPool, tmp_path: Path, layout: tuple[int, int, int], rank: int, zero: int
) -> None:
    told = [(False, False, FIRST_SCALE)] * OVERFLOW + [(True, True, FIRST_SCALE), (False, False, FIRST_SCALE / 2)]
    for whole, before, after in ranks.run(
        run_and_resume, math.prod(layout), half(*layout, zero=zero), str(tmp_path), rank
    ):
        assert whole[0] == told
        assert before[0] == told[OVERFLOW:] and after[0] == told[OVERFLOW + 1 :]
        assert whole[1] == before[1] == after[1]


def fallen(config: Config, run_dir: str) -> str:
    """The scale has fallen as far as it can, and still something overflows."""
    trainer = Trainer(config, open_corpus(config), CPU)
    trainer.state.loss_scale.restore({"value": FLOOR, "updates": 0})
    trainer.state.model.layers["1"].register_forward_hook(
        lambda module, inputs, y: y.register_hook(lambda dy: dy * math.inf) and None
    )
    skipped = SkippedSteps(trainer.planned, trainer.state.rank.activity, None)
    with pytest.raises(RunError) as error:
        for step in range(STEPS):
            result = trainer.step.run(step)
            assert result.skipped and not result.overflowed
            skipped.note(step, result, trainer.step)
    return str(error.value)


def test_a_scale_at_its_floor_ends_the_run_and_names_what_overflows(ranks: RankPool, tmp_path: Path) -> None:
    for message in ranks.run(fallen, 2, half(1, 2, 1), str(tmp_path)):
        assert "\n" not in message
        assert "with the loss scale at its floor, 1;" in message
        assert "the gradient of model.layers.1.mlp.down_proj.weight, layer 1, micro-batch 0" in message


@pytest.mark.slow
def test_float16_follows_float32(ranks: RankPool) -> None:
    """Losses to a few units of float16, with and without ranks."""
    config = half(1, 1, 1)
    wide = replace(config, train=replace(config.train, dtype="float32"))
    want, narrow = (ranks.run(losses, 1, one)[0] for one in (wide, config))
    split = ranks.run(losses, 4, half(2, 2, 1))[0]
    unit = torch.finfo(torch.float16).eps
    assert narrow == pytest.approx(want, rel=2 * unit) and split == pytest.approx(want, rel=2 * unit)


def losses(config: Config) -> list[float]:
    trainer = Trainer(config, open_corpus(config), CPU)
    return [trainer.step.run(step).loss for step in range(STEPS)]
