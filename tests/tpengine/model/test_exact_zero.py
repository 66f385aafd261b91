"""Rung: gloo ranks. Exact mode where replicas own slices (ZeRO): the bits of one process, at every stage.

A tensor's slices are whole blocks of 1024 elements, of which the largest tensors here have several, and the smallest
less than one. Buckets of any size hold any of a layer's weights: one alone, exactly those that one product reads, or
all of several layers. Layouts and sizes are drawn; `pytest -m slow` has the grid.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.exactness import (
    CPU,
    Found,
    alone,
    assert_same_bits,
    exact_config,
    merge,
    num_ranks,
    train,
    train_steps,
)
from support.engine.resuming import resumed
from support.ranks.rank_pool import RankError, RankPool
from torch import Tensor

from tpengine.checkpoint.resume import checkpoints_of, state_of
from tpengine.checkpoint.save import Saver
from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.data_parallel.weight_buckets import WeightBuckets
from tpengine.layers import PackedWeights
from tpengine.runs.trainer import Trainer
from tpengine.training.checkpoint_blocks import blocks_of
from tpengine.training.state_check import check_finite

# Layout, stage, residency, dtype, schedule, tied. By default the one that gathers and frees most.
CASES = [
    ((2, 1, 1), 3, "use", "float32", "1f1b", True),
    *(
        pytest.param(layout, zero, residency, dtype, schedule, tied, marks=pytest.mark.slow)
        for layout, zero, residency, dtype, schedule, tied in (
            ((2, 2, 1), 3, "step", "float32", "1f1b", True),
            ((2, 1, 2), 3, "use", "bfloat16", "zbv", True),
            ((2, 1, 1), 1, "auto", "float32", "1f1b", False),
            ((2, 1, 2), 2, "auto", "float16", "interleaved", True),
            ((4, 1, 1), 3, "use", "float64", "1f1b", False),
            ((4, 1, 2), 3, "step", "float32", "zbv", True),
            ((2, 4, 1), 3, "use", "float32", "1f1b", False),
            ((2, 2, 2), 1, "auto", "bfloat16", "gpipe", True),
        )
    ),
]


@pytest.mark.parametrize(("layout", "zero", "residency", "dtype", "schedule", "tied"), CASES)
def test_slices_have_the_bits_of_one_process(
    ranks: RankPool, layout: tuple[int, int, int], zero: int, residency: str, dtype: Any, schedule: str, tied: bool
) -> None:
    # zbv and interleaved cut the model into two chunks per rank.
    layers = 2 if layout[2] == 1 else 8
    config = exact_config(
        *layout, dtype=dtype, schedule=schedule, tied=tied, zero=zero, residency=residency, layers=layers
    )
    assert num_ranks(config) == math.prod(layout)
    reference = alone(config)
    want = merge(reference, ranks.run(train, 1, reference))
    assert_same_bits(merge(config, ranks.run(train, num_ranks(config), config)), want)


# Of 1 byte a bucket holds what one product multiplies by, and nothing else; the last holds all of a layer.
BUCKET_BYTES = (1, 1000, 3000, 10**6)
# As many shards as heads: with 2 on tp 2 each rank has one, and its weights may be all that a bucket holds.
GRID = [
    (layout, zero, heads, kv_heads, bucket_bytes)
    for layout in ((2, 1), (2, 2), (4, 1))
    for zero in (1, 2, 3)
    for heads, kv_heads in ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
    for bucket_bytes in BUCKET_BYTES
]
DRAWN = [((2, 2), 1, 2, 1, 1), *random.Random(39).sample(GRID, 3)]


def small_config(layout: tuple[int, int], zero: int, heads: int, kv_heads: int, bucket_bytes: int) -> Config:
    config = exact_config(*layout, heads=heads, kv_heads=kv_heads, layers=1, steps=2, dropout=0.0, zero=zero)
    return replace(config, parallel=replace(config.parallel, bucket_bytes=bucket_bytes))


@pytest.mark.by_default("layout1-3-4-2-1000")
@pytest.mark.parametrize(
    ("layout", "zero", "heads", "kv_heads", "bucket_bytes"),
    [*DRAWN, *(pytest.param(*case, marks=pytest.mark.slow) for case in GRID if case not in DRAWN)],
)
def test_buckets_of_any_size_have_the_bits_of_one_process(
    ranks: RankPool, layout: tuple[int, int], zero: int, heads: int, kv_heads: int, bucket_bytes: int
) -> None:
    config = small_config(layout, zero, heads, kv_heads, bucket_bytes)
    reference = alone(config)
    want = merge(reference, ranks.run(train, 1, reference))
    assert_same_bits(merge(config, ranks.run(train, num_ranks(config), config)), want)


def packed_as_they_lie(packing: PackedWeights, weights: Sequence[Tensor]) -> Tensor:
    """As packing once was: memory that holds nothing but its weights was taken for the layers' own, and left."""
    matrix = torch.cat([weight.detach() for weight in weights])
    for weight, piece in zip(weights, matrix.split([len(weight) for weight in weights]), strict=True):
        memory = weight.untyped_storage()
        inside = [other.nbytes for other in weights if other.untyped_storage().data_ptr() == memory.data_ptr()]
        if memory.nbytes() == sum(inside):
            weight.data = piece
    return matrix


def train_moved(config: Config, asserts: bool) -> Found:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedWeights, "_packed", packed_as_they_lie)
        if not asserts:
            patch.setattr(WeightBuckets, "check_owned", lambda self, index: None)
        return train(config)


@pytest.mark.slow
def test_packing_that_moves_what_a_bucket_owns_is_caught(ranks: RankPool) -> None:
    """By the gather that follows, and without that assertion by the bits."""
    config = small_config(*DRAWN[0])
    with pytest.raises(RankError, match=r"one owner per weight: layers\.0\.self_attn"):
        ranks.run(train_moved, 4, config, True)
    reference = alone(config)
    want = merge(reference, ranks.run(train, 1, reference))
    with pytest.raises(AssertionError, match=r"digests differ|than a rank before it|differ from rank 0"):
        assert_same_bits(merge(config, ranks.run(train_moved, 4, config, False)), want)


def skips_what_no_moment_holds(config: Config) -> bool:
    """A gradient whose square is finite in float64 alone."""
    trainer = Trainer(config, open_corpus(config), CPU)
    finish = trainer.state.gradients.finish

    def spoilt() -> None:
        finish()
        next(iter(trainer.state.gradients.of.values())).view(-1)[0] = 1e25

    trainer.state.gradients.finish = spoilt  # type: ignore[method-assign]
    return trainer.step.run(0).skipped


def test_a_square_that_overflows_a_moment_is_not_finite(ranks: RankPool) -> None:
    config = exact_config(layers=2)
    config = replace(config, optim=replace(config.optim, clip_norm=0.0))
    assert ranks.run(skips_what_no_moment_holds, 1, config) == [True]


def saved_and_gone_on(config: Config, run_dir: str) -> tuple[int, Found]:
    trainer = Trainer(config, open_corpus(config), CPU)
    trainer.step.run(0)
    check_finite(trainer.state)
    saver = Saver(checkpoints_of(run_dir), keep=1)
    saver.save(1, blocks_of(trainer.state), state_of(config, trainer.state.part.corpus.fingerprint(), 1))
    assert saver.wait() is None
    return len(trainer.state.weights), train_steps(resumed(config, run_dir, 1), 1, 2)


@pytest.mark.slow
def test_a_replica_may_own_nothing(ranks: RankPool, tmp_path: Path) -> None:
    """One small layer, fewer blocks than replicas: it is checked, saved and loaded all the same."""
    config = exact_config(8, heads=1, kv_heads=1, layers=1, micro_batches=8, zero=3)
    found = ranks.run(saved_and_gone_on, 8, config, str(tmp_path))
    assert min(number for number, _ in found) == 0
    reference = alone(config)
    want = merge(reference, ranks.run(second_step, 1, reference))
    assert_same_bits(merge(config, [outcome for _, outcome in found]), want)


def second_step(config: Config) -> Found:
    trainer = Trainer(config, open_corpus(config), CPU)
    trainer.step.run(0)
    return train_steps(trainer, 1, 2)
