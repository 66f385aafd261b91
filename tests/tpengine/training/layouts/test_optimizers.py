"""Rung: gloo ranks. Every optimizer trains in any layout as in one process, and goes on in another; in exact mode to
the last bit. What a rank holds is what the memory sheet says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.exactness import CPU, Found, assert_same_bits, exact_config, merge, train_steps
from support.engine.parity import STEPS, Outcome, compare, config_of, outcome_of
from support.engine.resuming import resumed
from support.ranks.rank_pool import RankPool
from torch import Tensor

from tpengine.checkpoint.index import CheckpointError, read_index
from tpengine.checkpoint.resume import checkpoints_of, find_checkpoint, state_of
from tpengine.checkpoint.save import Saver
from tpengine.commands.checkpoint_diff import compare as differences
from tpengine.config import Config, OptimConfig, optimizer_kind
from tpengine.config.optimizers import OPTIMIZERS
from tpengine.data import open_corpus
from tpengine.layout.state_bytes import state_bytes
from tpengine.layout.step_plan import layout_of, training_plan
from tpengine.planner.modelled.memory import memory_of
from tpengine.runs.trainer import Trainer
from tpengine.training.checkpoint_blocks import blocks_of
from tpengine.training.elementwise import UpdateNumbers
from tpengine.training.state_check import check_finite, check_replicas
from tpengine.training.train_state import TrainState
from tpengine.training.update_rules import with_rule

Layout = tuple[int, int, int, int]
HALF = 1


class Halved:
    """An optimizer of a user's own: sgd whose momentum is kept halved."""

    name, states, operations = "halved", ("half",), 6

    def update(
        self, weight: Tensor, gradient: Tensor, states: Mapping[str, Tensor], numbers: UpdateNumbers
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        momentum = numbers.beta1 * 2 * states["half"] + gradient + numbers.weight_decay * weight
        return weight - numbers.lr * momentum, {"half": momentum / 2}


# By the test's name: settings of optim, and an optimizer of one's own.
CASES: dict[str, tuple[OptimConfig, Halved | None]] = {
    "own": (OptimConfig(), Halved()),
    **{f"{name} bfloat16": (OptimConfig(name=name, moments="bfloat16"), None) for name in ("adamw", "lion")},
    **{name: (OptimConfig(name=name), None) for name in OPTIMIZERS if name != "adamw"},
}


def with_case(config: Config, case: str) -> Config:
    optim, own = CASES[case]
    config = replace(config, optim=replace(optim, clip_norm=0.5, warmup_steps=1, lr=1e-3))
    return config if own is None else with_rule(config, own)


def trainer_of(config: Config, case: str) -> Trainer:
    return Trainer(config, open_corpus(config), CPU, optimizer=CASES[case][1])


def grouped(state: TrainState) -> dict[str, tuple[float, float]]:
    """Rates and decays of their own for weights of the same kind."""
    return {name: (0.5 if "q_proj" in name else 1.0, 0.2 if "norm" in name else 0.1) for name in state.model.pieces}


def train(config: Config, case: str, lost_on: int | None = None) -> Outcome:
    """Train with groups; rank `lost_on` takes everything for one group."""
    with pytest.MonkeyPatch.context() as patch:
        if lost_on is None or torch.distributed.get_rank() != lost_on:
            patch.setattr(TrainState, "updates", property(grouped))
        trainer = trainer_of(config, case)
        found = outcome_of(trainer)
    check_finite(trainer.state)
    check_replicas(trainer.state, STEPS)
    expected = state_bytes(config, layout_of(config), trainer.state.rank.mesh.at.pp, trainer.state.rank.mesh.at.dp)
    states = [trainer.state.optimizer.state_of(name) for name in trainer.state.weights]
    assert sum(t.nbytes for kept in states for t in kept.values()) == expected.moments + expected.masters
    return found


def of_layout(layout: Layout, case: str) -> Config:
    dp, tp, pp, zero = layout
    return with_case(config_of(dp, tp, pp, tied=True, kv_heads=1, zero=zero), case)


LAYOUTS: list[Layout] = [(2, 2, 1, 0), (2, 2, 1, 1), (2, 2, 1, 3), (2, 1, 2, 2), (1, 2, 2, 0)]


@pytest.mark.by_default("layout1-lion bfloat16", "layout2-torch.RMSprop")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizer_trains_as_in_one_process(ranks: RankPool, layout: Layout, case: str) -> None:
    """Losses, norms and weights, in float64, with groups; the states have the bytes that the memory sheet counts."""
    reference = ranks.run(train, 1, of_layout((1, 1, 1, 0), case), case)[0]
    compare(ranks.run(train, math.prod(layout[:3]), of_layout(layout, case), case), reference)


@pytest.mark.parametrize("layout", [(2, 1, 1, 0), pytest.param((1, 2, 1, 0), marks=pytest.mark.slow)])
def test_a_group_that_is_lost_on_one_rank_is_noticed(ranks: RankPool, layout: Layout) -> None:
    """Replicas of a weight, and of a norm over tp, come apart: the check before a checkpoint names one."""
    with pytest.raises(Exception, match=r"replicas must be equal: after step 3 .* differs between ranks 0 and 1"):
        ranks.run(train, 2, of_layout(layout, "sgd"), "sgd", 1)


def save(trainer: Trainer, run_dir: str, step: int) -> None:
    saver, part = Saver(checkpoints_of(run_dir), keep=3), trainer.state.part
    saver.save(step, blocks_of(trainer.state), state_of(part.config, part.corpus.fingerprint(), step))
    assert saver.wait() is None


def exact(layout: Layout, case: str, dtype: Any) -> Config:
    dp, tp, pp, zero = layout
    return with_case(exact_config(dp, tp, pp, dtype=dtype, layers=2, micro_batches=4, steps=2, zero=zero), case)


def whole_run(config: Config, case: str, run_dir: str) -> Found:
    trainer = trainer_of(config, case)
    found = train_steps(trainer, 0, 2)
    save(trainer, run_dir, 2)
    return found


def first_half(config: Config, case: str, run_dir: str) -> Found:
    trainer = trainer_of(config, case)
    found = train_steps(trainer, 0, HALF)
    save(trainer, run_dir, HALF)
    return found


def second_half(config: Config, case: str, run_dir: str) -> Found:
    trainer = resumed(config, run_dir, HALF, CASES[case][1])
    found = train_steps(trainer, HALF, 2)
    save(trainer, run_dir, 2)
    return found


CHANGES: list[tuple[Layout, Layout]] = [
    ((2, 1, 1, 3), (1, 2, 1, 0)),
    ((1, 2, 1, 0), (2, 1, 2, 1)),
    ((2, 2, 1, 2), (1, 1, 2, 0)),
]


@pytest.mark.by_default("change0-bfloat16-adamw bfloat16")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("change", CHANGES)
def test_exact_mode_goes_on_in_another_layout_with_the_bits_of_one_process(
    ranks: RankPool, tmp_path: Path, change: tuple[Layout, Layout], dtype: str, case: str
) -> None:
    """Weights, masters, what is kept, norms and losses; `checkpoint diff` finds no difference between the ends."""
    alone = exact((1, 1, 1, 0), case, dtype)
    want = merge(alone, ranks.run(whole_run, 1, alone, case, str(tmp_path / "whole")))
    before, after = (exact(layout, case, dtype) for layout in change)
    first = merge(before, ranks.run(first_half, math.prod(change[0][:3]), before, case, str(tmp_path / "cut")))
    second = merge(after, ranks.run(second_half, math.prod(change[1][:3]), after, case, str(tmp_path / "cut")))
    assert_same_bits(replace(second, numbers=first.numbers + second.numbers), want)
    ends = [checkpoints_of(tmp_path / name).of_step(2) for name in ("whole", "cut")]
    assert differences(*ends)[1] == []
    states = optimizer_kind(alone.optim).states
    kinds = {name.split(".")[1] for name in read_index(ends[0]).tensors if name.startswith("optimizer.")}
    assert kinds == {*states, *(["master"] if dtype == "bfloat16" else [])}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "lion"}, ["must keep optim.name", "saved with sgd, this run has lion", "use optim.name sgd"]),
        ({"moments": "bfloat16"}, ["must keep optim.moments", "float32", "bfloat16"]),
    ],
)
def test_another_optimizer_does_not_go_on(
    ranks: RankPool, tmp_path: Path, settings: dict[str, Any], words: list[str]
) -> None:
    config = exact((1, 1, 1, 0), "sgd", "float32")
    ranks.run(first_half, 1, config, "sgd", str(tmp_path))
    other = replace(config, run_dir=str(tmp_path), optim=replace(config.optim, **settings))
    with pytest.raises(CheckpointError) as error:
        find_checkpoint(other, open_corpus(config).fingerprint())
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), error.value


def test_the_sheet_counts_what_the_optimizer_keeps() -> None:
    config = of_layout((2, 1, 1, 1), "torch.RMSprop")
    held = {}
    for name, moments in (("adamw", "float32"), ("adamw", "bfloat16"), ("sgd", "float32")):
        of = replace(config, optim=OptimConfig(name=name, moments=moments))  # type: ignore[arg-type]
        layout = layout_of(of)
        (memory,) = memory_of(of, layout, training_plan(of, layout))
        held[name, moments] = memory.kinds()["moments"]
    # In float64 two moments are 16 bytes.
    assert held["adamw", "float32"] == 4 * held["adamw", "bfloat16"] == 2 * held["sgd", "float32"]
