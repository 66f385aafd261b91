"""Rung: pure; gloo ranks. What is not finite, or differs between replicas, is named by all ranks and not saved.

What only a GPU checks: that hashes there are those of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.engine.exactness import exact_config
from support.engine.parity import config_of
from support.ranks.rank_pool import RankPool
from torch import Tensor

from tpengine.checkpoint.resume import checkpoints_of
from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.runs.checkpoints import RunCheckpoints
from tpengine.runs.trainer import Trainer
from tpengine.training.planned_run import RunError
from tpengine.training.state_check import bits_hash

CPU = torch.device("cpu")


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bits_hash_sees_every_single_bit(dtype: torch.dtype) -> None:
    for shape in ((3, 7), (2, 6)):  # words of an element each, and words of 64 bits
        tensor = torch.randn(shape).to(dtype)
        seen = {int(bits_hash(tensor))}
        num_bits = bytes_of(tensor).numel() * 8
        for bit in range(num_bits):
            bytes_of(tensor)[bit // 8] ^= 1 << bit % 8
            seen.add(int(bits_hash(tensor)))
            bytes_of(tensor)[bit // 8] ^= 1 << bit % 8
        assert len(seen) == num_bits + 1


def test_bits_hash_sees_where_elements_lie_and_signs_of_zeros() -> None:
    """Over several blocks of rows: rows and columns exchanged, two signs at once, NaN as equal as its bits."""
    tensor = torch.randn(300_001, dtype=torch.float64)
    want = int(bits_hash(tensor))
    assert int(bits_hash(tensor.clone())) == want
    for first, second in ((0, 1), (5, 5 + (1 << 14)), (7, 7 + (1 << 16)), (299_000, 300_000)):
        other = tensor.clone()
        other[[first, second]] = tensor[[second, first]]
        assert int(bits_hash(other)) != want
    zeros, signs = torch.zeros(64), torch.zeros(64)
    signs[[1, 3]] = -0.0
    assert int(bits_hash(zeros)) != int(bits_hash(signs))
    nans = torch.full((9,), torch.nan)
    assert int(bits_hash(nans)) == int(bits_hash(nans.clone()))
    assert int(bits_hash(tensor.view(1, -1).T)) == want


def flip(tensor: Tensor) -> None:
    """The lowest bit of an element."""
    bytes_of(tensor.detach())[8] ^= 1


def one_moment(trainer: Trainer) -> None:
    flip(trainer.state.optimizer.state_of("layers.3.mlp.up_proj.weight")["exp_avg_sq"])


def norm_of_one_tp_rank(trainer: Trainer) -> None:
    flip(trainer.state.optimizer.masters["layers.1.input_layernorm.weight"])


def shared_kv_head(trainer: Trainer) -> None:
    flip(trainer.state.optimizer.masters["layers.4.self_attn.k_proj.weight"])


def tied_end(trainer: Trainer) -> None:
    flip(trainer.state.optimizer.masters["embed_tokens.weight"])


DRIFTS: dict[str, tuple[Callable[[Trainer], None], tuple[int, int, int], int, str]] = {
    "replica": (one_moment, (2, 1, 1), 1, "optimizer.exp_avg_sq.model.layers.3.mlp.up_proj.weight"),
    "norm": (norm_of_one_tp_rank, (1, 2, 1), 1, "model.layers.1.input_layernorm.weight"),
    "kv": (shared_kv_head, (1, 2, 1), 0, "model.layers.4.self_attn.k_proj.weight"),
    "ends": (tied_end, (1, 1, 2), 1, "model.embed_tokens.weight"),
}


def drifting(config: Config, run_dir: str, drift: str) -> list[str]:
    """Two steps, a drift on one rank, and what the next check says; the state before it is fine."""
    spoil, _, rank, _ = DRIFTS[drift]
    trainer = Trainer(config, open_corpus(config), CPU)
    said = []
    with RunCheckpoints(trainer.state, trainer.planned, Path(run_dir) if dist.get_rank() == 0 else None) as checkpoints:
        for step in range(2):
            trainer.step.run(step)
            checkpoints.after_step(step + 1)
        if dist.get_rank() == rank:
            spoil(trainer)
        for num_steps in (3, 4):  # one between checkpoints, one at a checkpoint
            try:
                checkpoints.after_step(num_steps)
            except RunError as error:
                said.append(str(error))
    return said


@pytest.mark.by_default("replica")
@pytest.mark.parametrize("drift", DRIFTS)
def test_replicas_that_differ_in_a_bit_are_named_and_not_saved(ranks: RankPool, tmp_path: Path, drift: str) -> None:
    _, (dp, tp, pp), _, tensor = DRIFTS[drift]
    config = config_of(dp, tp, pp, tied=True, kv_heads=1)
    train = replace(config.train, steps=8, checkpoint_every=2, check_replicas_every=1)
    said = ranks.run(drifting, dp * tp * pp, replace(config, train=train), str(tmp_path), drift)
    assert said[0] == said[-1]
    # Masters alone are compared between checkpoints.
    checks = (4,) if drift == "replica" else (3, 4)
    for num_steps, message in zip(checks, said[0], strict=True):
        assert message.startswith(
            f"replicas must be equal: after step {num_steps} {tensor} differs between ranks 0 and 1"
        )
    assert checkpoints_of(str(tmp_path)).steps() == [2]


def weight_with_memory_of_its_own(trainer: Trainer) -> None:
    """As by a layer that takes memory for its own: values are right until the next update."""
    weight = trainer.state.model.held["layers.1.self_attn.k_proj.weight"]
    weight.data = weight.detach().clone()


def weight_that_is_not_its_master(trainer: Trainer) -> None:
    flip(trainer.state.weights["layers.0.mlp.up_proj.weight"])


LOST = {
    weight_with_memory_of_its_own: "model.layers.1.self_attn.k_proj.weight",
    weight_that_is_not_its_master: "model.layers.0.mlp.up_proj.weight",
}


def losing(config: Config, lose: str) -> list[str]:
    """What the check between checkpoints says after a step, and after a loss on one rank."""
    trainer, said = Trainer(config, open_corpus(config), CPU), []
    trainer.step.run(0)
    with RunCheckpoints(trainer.state, trainer.planned, None) as checkpoints:
        checkpoints.after_step(1)
        if dist.get_rank() == 1:
            globals()[lose](trainer)
        try:
            checkpoints.after_step(1)
        except RunError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("lose", LOST)
def test_a_weight_that_is_trained_elsewhere_than_it_is_read_is_named(
    ranks: RankPool, lose: Callable[[Trainer], None]
) -> None:
    config = exact_config(2, 1, 1, dtype="bfloat16", layers=2, reduction="fast", zero=1)
    train = replace(config.train, check_replicas_every=1)
    said = ranks.run(losing, 2, replace(config, train=train), lose.__name__)
    for of_rank in said:
        assert of_rank[0].startswith(
            f"forward must read the weights that are trained: after step 1 {LOST[lose]} is another one"
        )


def trained(config: Config, run_dir: str) -> int:
    trainer = Trainer(config, open_corpus(config), CPU)
    with RunCheckpoints(trainer.state, trainer.planned, Path(run_dir) if dist.get_rank() == 0 else None) as checkpoints:
        for step in range(config.train.steps):
            trainer.step.run(step)
            checkpoints.after_step(step + 1)
    return trainer.state.num_updates


@pytest.mark.parametrize("reduction", ["fast", pytest.param("exact", marks=pytest.mark.slow)])
def test_replicas_stay_equal(ranks: RankPool, tmp_path: Path, reduction: str) -> None:
    """Norms, a KV head that two ranks share, tied ends and replicas at once."""
    config = exact_config(1, 2, 2, dtype="bfloat16", kv_heads=1, layers=2, reduction=reduction)  # type: ignore[arg-type]
    train = replace(config.train, checkpoint_every=2, check_replicas_every=1)
    assert ranks.run(trained, 4, replace(config, train=train), str(tmp_path)) == [3] * 4
    assert checkpoints_of(str(tmp_path)).steps() == [2, 3]


def saving_poison(config: Config, run_dir: str, what: str) -> str:
    trainer = Trainer(config, open_corpus(config), CPU)
    with RunCheckpoints(trainer.state, trainer.planned, Path(run_dir) if dist.get_rank() == 0 else None) as checkpoints:
        trainer.step.run(0)
        checkpoints.after_step(1)
        name = "layers.4.mlp.down_proj.weight"
        if name in trainer.state.model.held:
            weight = trainer.state.model.held[name].detach()
            tensor = weight if what == "" else trainer.state.optimizer.state_of(name)[what]
            tensor[1, 2] = torch.nan if what == "exp_avg" else torch.inf
        try:
            checkpoints.after_step(2)
        except RunError as error:
            return str(error)
    return "no error"


@pytest.mark.by_default("master")
@pytest.mark.parametrize("what", ["", "master", "exp_avg", "exp_avg_sq"])
def test_a_checkpoint_that_is_not_finite_never_gets_its_name(ranks: RankPool, tmp_path: Path, what: str) -> None:
    """Only the second stage has the number that is not finite; what is older stays."""
    config = config_of(1, 1, 2, tied=False, kv_heads=1)
    config = replace(config, train=replace(config.train, checkpoint_every=1, dtype="bfloat16"))
    name = f"optimizer.{what}.model" if what else "model"
    for message in ranks.run(saving_poison, 2, config, str(tmp_path), what):
        assert message.startswith(f"a checkpoint's numbers must be finite: {name}.layers.4.mlp.down_proj.weight is not")
    assert checkpoints_of(str(tmp_path)).steps() == [1]
