"""Rung: gloo ranks. In exact mode a run that is saved and goes on in another layout has the bits of one that did not.

What only a GPU checks: the same there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.engine.exactness import (
    CPU,
    DType,
    Found,
    Reduction,
    assert_same_bits,
    digests_of,
    exact_config,
    merge,
    num_ranks,
    train,
    train_steps,
)
from support.engine.resuming import resumed
from support.ranks.rank_pool import RankPool
from torch import Tensor

from tpengine.checkpoint.resume import checkpoints_of, state_of
from tpengine.checkpoint.save import Saver
from tpengine.checkpoint.storage import parts_of
from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.runs.trainer import Trainer
from tpengine.training.checkpoint_blocks import blocks_of

Layout = tuple[int, int, int]
# By the name it is saved under: where each block of this rank lies in the global tensor, and its elements.
State = dict[str, list[tuple[tuple[int, ...], Tensor]]]


def config_for(layout: Layout, dtype: DType, steps: int, reduction: Reduction = "exact") -> Config:
    # 3 layers are uneven on 2 stages; 4 replicas, in bfloat16, need 4 micro-batches.
    num = 4 if dtype == "bfloat16" else 2
    return exact_config(*layout, dtype=dtype, layers=3, micro_batches=num, steps=steps, reduction=reduction)


def half_of(config: Config) -> int:
    """The step after which a run is saved."""
    return config.train.steps // 2


def save(trainer: Trainer, run_dir: str) -> None:
    saver, step = Saver(checkpoints_of(run_dir), keep=2), half_of(trainer.state.part.config)
    saver.save(
        step,
        blocks_of(trainer.state),
        state_of(trainer.state.part.config, trainer.state.part.corpus.fingerprint(), step),
    )
    assert saver.wait() is None


def train_and_save(config: Config, run_dir: str) -> Found:
    trainer = Trainer(config, open_corpus(config), CPU)
    found = train_steps(trainer, 0, half_of(config))
    save(trainer, run_dir)
    return found


def resume_and_train(config: Config, run_dir: str) -> tuple[Found, Found]:
    """What was loaded, and what training came to."""
    trainer = resumed(config, run_dir, half_of(config))
    return ([], digests_of(trainer)), train_steps(trainer, half_of(config), config.train.steps)


# (dp, tp, pp) that saves, layouts that go on: every axis grows and shrinks, KV heads become shared and single again.
Changes = dict[Layout, list[Layout]]
FLOAT32: Changes = {(1, 1, 1): [(2, 2, 1)], (1, 4, 1): [(2, 1, 2), (1, 1, 1)]}
BFLOAT16: Changes = {(4, 1, 1): [(1, 2, 2)], (2, 1, 1): [(1, 4, 1)]}


# By default one change of every axis, after a step of 2.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "changes", "steps"),
    [
        ("float32", {(1, 2, 1): [(2, 1, 2)]}, 2),
        pytest.param("float32", FLOAT32, 10, marks=pytest.mark.slow),
        pytest.param("bfloat16", BFLOAT16, 10, marks=pytest.mark.slow),
    ],
    ids=["one change", "float32", "bfloat16"],
)
def test_all_steps_are_half_of_them_and_half_in_another_layout(
    ranks: RankPool, tmp_path: Path, dtype: DType, changes: Changes, steps: int
) -> None:
    """Losses, norms, weights, gradients, moments, masters; dropout goes on too."""
    whole = config_for((1, 1, 1), dtype, steps)
    want = merge(whole, ranks.run(train, 1, whole))
    for saving, others in changes.items():
        run_dir = str(tmp_path / "-".join(map(str, saving)))
        config = config_for(saving, dtype, steps)
        first = merge(config, ranks.run(train_and_save, num_ranks(config), config, run_dir))
        assert first.numbers == want.numbers[: half_of(config)]
        for layout in others:
            config = config_for(layout, dtype, steps)
            loaded, second = zip(*ranks.run(resume_and_train, num_ranks(config), config, run_dir), strict=True)
            state = merge(config, loaded).digests
            assert [key for key in state if key[2] != "gradient" and state[key] != first.digests[key]] == []
            bits = merge(config, second)
            assert_same_bits(replace(bits, numbers=first.numbers + bits.numbers), want)


def state_of_rank(trainer: Trainer) -> State:
    return {
        name: [(part.offset, part.tensor.detach().clone()) for part in parts_of(entry)]
        for name, entry in blocks_of(trainer.state).items()
    }


def state_and_next_loss(config: Config, run_dir: str, saves: bool) -> tuple[State, float]:
    """After steps that are trained and saved, or loaded; and the loss of the step after."""
    step = half_of(config)
    trainer = Trainer(config, open_corpus(config), CPU) if saves else resumed(config, run_dir, step)
    if saves:
        train_steps(trainer, 0, step)
        save(trainer, run_dir)
    return state_of_rank(trainer), trainer.step.run(step).loss


def put_together(states: Sequence[State]) -> dict[str, Tensor]:
    """The global tensors; whoever holds the same block holds the same elements."""
    blocks: dict[str, dict[tuple[int, ...], Tensor]] = defaultdict(dict)
    for state in states:
        for name, parts in state.items():
            for offset, tensor in parts:
                assert torch.equal(blocks[name].setdefault(offset, tensor), tensor), name
    whole = {}
    for name, parts in blocks.items():
        shape = [max(o[dim] + t.shape[dim] for o, t in parts.items()) for dim in range(len(next(iter(parts))))]
        whole[name] = torch.full(shape, torch.nan, dtype=next(iter(parts.values())).dtype)
        for offset, tensor in parts.items():
            whole[name][tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))] = tensor
        assert not whole[name].isnan().any(), f"{name} has elements that no rank holds"
    return whole


@pytest.mark.by_default("exact-fast-float32-2")
@pytest.mark.parametrize(
    ("saving", "going_on", "dtype", "steps"),
    [
        ("exact", "fast", "float32", 2),
        ("fast", "exact", "float32", 2),
        pytest.param("fast", "exact", "bfloat16", 10, marks=pytest.mark.slow),
    ],
)
def test_a_run_may_change_between_fast_and_exact(
    ranks: RankPool, tmp_path: Path, saving: Reduction, going_on: Reduction, dtype: DType, steps: int
) -> None:
    """The bits of later steps are then nobody's promise; those that are loaded are what was saved."""
    before = config_for((1, 2, 1), dtype, steps, saving)
    after = config_for((2, 1, 1), dtype, steps, going_on)
    saved, want_losses = zip(*ranks.run(state_and_next_loss, 2, before, str(tmp_path), True), strict=True)
    loaded, losses = zip(*ranks.run(state_and_next_loss, 2, after, str(tmp_path), False), strict=True)
    want, got = put_together(saved), put_together(loaded)
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []
    # The loss is of the weights that were loaded: each layer rounds otherwise.
    num_layers = after.model.num_layers
    assert abs(losses[0] - want_losses[0]) <= num_layers * torch.finfo(getattr(torch, dtype)).eps * want_losses[0]
