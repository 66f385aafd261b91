"""Rung: gloo ranks. What ZeRO holds, in bytes counted from live tensors; and its checkpoints, whatever layout goes on.

What only GPUs check: what torch.cuda counts.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.architectures.looped_experts import permit_looped, with_experts
from support.architectures.runs import pieces_of
from support.engine.parity import Outcome, compare, config_of
from support.engine.resuming import resumed
from support.ranks.rank_pool import RankPool

from tpengine.checkpoint.index import CheckpointError
from tpengine.checkpoint.resume import checkpoints_of, state_of
from tpengine.checkpoint.save import Saver
from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.data_parallel.bucket import FlatBucket
from tpengine.layout.parameters import stage_specs
from tpengine.layout.state_bytes import StateBytes, num_weights, state_bytes
from tpengine.layout.step_plan import layout_of
from tpengine.runs.trainer import Trainer
from tpengine.training.checkpoint_blocks import blocks_of
from tpengine.training.state_check import check_finite, check_replicas

CPU = torch.device("cpu")
# Bytes per weight, whole and divided by the number of replicas, by dtype and stage.
FORMULAS = {
    "bfloat16": {0: (18, 0), 1: (6, 12), 2: (2, 16), 3: (0, 18)},
    "float32": {0: (16, 0), 1: (8, 8), 2: (4, 12), 3: (0, 16)},
}


def storage_bytes(tensors: Any) -> int:
    """Bytes of the distinct memories of tensors."""
    return sum({id_of(t): t.untyped_storage().nbytes() for t in tensors if not t.is_meta}.values())


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def counted_on_a_host_each(config: Config) -> tuple[StateBytes, StateBytes, int]:
    """Count without shared memory, whose blocks are tensors too."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("tpkernels.symmetric.memory", "tpengine.distributed.process"):
            patch.setattr(f"{module}.host_identity", dist.get_rank)
        return counted(config)


def counted(config: Config) -> tuple[StateBytes, StateBytes, int]:
    """After a step: what the optimizer, the buckets and the weights hold, what it should be, and all other tensors."""
    trainer = Trainer(config, open_corpus(config), CPU)
    trainer.step.run(0)
    trainer.step.run(1)
    weights = [*trainer.state.model.held.values(), *trainer.state.weights.values()]
    gradients = [*trainer.state.buckets.flat.values(), *trainer.state.gradients.of.values()]
    states = [trainer.state.optimizer.state_of(name) for name in trainer.state.weights]
    moments = [tensors[kind] for tensors in states for kind in ("exp_avg", "exp_avg_sq")]
    masters = [tensors["master"] for tensors in states if "master" in tensors]
    expected = state_bytes(
        config, trainer.state.part.layout, trainer.state.rank.mesh.at.pp, trainer.state.rank.mesh.at.dp
    )
    found = StateBytes(
        storage_bytes(weights),
        storage_bytes(gradients),
        storage_bytes(masters),
        storage_bytes(moments),
        expected.padding,
    )
    gc.collect()
    known = {id_of(tensor) for tensor in (*weights, *gradients, *masters, *moments)}
    # Views that nothing but a tensor of the graph holds are found by their memory.
    others = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and not t.is_meta and id_of(t) not in known]
    largest = max((t.untyped_storage().nbytes() for t in others), default=0)
    return found, expected, largest


@pytest.mark.by_default("2-2-bfloat16")
@pytest.mark.parametrize(
    ("dp", "dtype"),
    [(2, "bfloat16"), *(pytest.param(dp, dtype, marks=pytest.mark.slow) for dp in (4, 8) for dtype in FORMULAS)],
)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_state_is_the_formulas_to_the_byte(ranks: RankPool, zero: int, dp: int, dtype: str) -> None:
    config = config_of(dp, 1, 1, tied=True, kv_heads=2, num_micro_batches=8, zero=zero)
    config = replace(config, train=replace(config.train, dtype=dtype))
    whole, shared = FORMULAS[dtype][zero]
    found = ranks.run(counted_on_a_host_each, dp, config)
    for counted_bytes, expected, _ in found:
        assert counted_bytes == expected
    numel = sum(math.prod(shape) for shape in shapes_of(config))
    # Over all replicas: padding apart, the formula.
    total = sum(one.total - one.padding for one, _, _ in found)
    assert total == numel * (whole * dp + shared)
    # No copy of a matrix is left besides.
    assert all(largest < numel // 4 for _, _, largest in found)


def experts_counted(config: Config) -> tuple[StateBytes, StateBytes, int]:
    permit_looped()
    return counted_on_a_host_each(config)


# dp, tp, ep: two replicas of every expert, and one.
@pytest.mark.slow
@pytest.mark.parametrize("layout", [(4, 1, 2), (2, 2, 4)])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_state_with_shared_experts_is_counted_to_the_byte(
    ranks: RankPool, zero: int, layout: tuple[int, int, int]
) -> None:
    dp, tp, ep = layout
    config = config_of(dp, tp, 1, tied=False, kv_heads=4, num_layers=2, zero=zero)
    config = with_experts(replace(config, train=replace(config.train, dtype="bfloat16")), ep)
    for counted_bytes, expected, _ in ranks.run(experts_counted, dp * tp, config):
        assert counted_bytes == expected


def held_at_the_beginning(config: Config) -> tuple[int, int]:
    """Return the elements of a new trainer's largest gradient buffer, and all bytes of its state.

    Gradient buffers, and those of weights, have existed one after the other, and no packed copy of weights is left.
    """
    made: list[FlatBucket] = []
    buffers: list[int] = []
    free = FlatBucket.free

    def watched(bucket: FlatBucket) -> None:
        made.append(bucket)
        buffers.append(sum(bucket.flat.untyped_storage().nbytes() for bucket in made))
        free(bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatBucket, "free", watched)
        for module in ("tpkernels.symmetric.memory", "tpengine.distributed.process"):
            patch.setattr(f"{module}.host_identity", dist.get_rank)
        trainer = Trainer(config, open_corpus(config), CPU)
    largest = max(flat.numel() * flat.element_size() for flat in trainer.state.buckets.flat.values())
    assert max(buffers) == largest
    gc.collect()
    shapes = {tuple(weight.shape) for weight in trainer.state.model.held.values()}
    packed = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.dim() == 2 and not t.is_meta]
    # Views of memory that has been taken away; nothing else of the size of a matrix has memory.
    return sum(t.untyped_storage().nbytes() for t in packed if tuple(t.shape) in shapes), len(packed)


def test_nothing_whole_is_held_before_the_first_step(ranks: RankPool) -> None:
    config = config_of(2, 1, 1, tied=False, kv_heads=2, zero=3)
    for whole, number in ranks.run(held_at_the_beginning, 2, config):
        assert number > 0 and whole == 0


def shapes_of(config: Config) -> list[tuple[int, ...]]:
    return [spec.shape for spec in stage_specs(config.model, 1, 0, config.model.num_layers)]


def test_the_formula_of_a_model_is_that_of_its_weights() -> None:
    for dtype, of_stage in FORMULAS.items():
        config = config_of(1, 1, 1, tied=False, kv_heads=2)
        config = replace(config, train=replace(config.train, dtype=dtype))  # type: ignore[arg-type]
        layout = layout_of(config)
        assert state_bytes(config, layout, 0).total == of_stage[0][0] * num_weights(config, layout, 0)


def traffic(config: Config) -> tuple[int, int, int]:
    """Elements that this rank sends in a step: gathered, reduced; and those of the padded buckets."""
    trainer = Trainer(config, open_corpus(config), CPU)
    sent = {"gathered": 0, "reduced": 0}
    comm = trainer.state.rank.comms.dp
    gather, reduce = comm.start_all_gather, comm.start_reduce_scatter

    def counted_gather(own: torch.Tensor, full: torch.Tensor) -> Any:
        assert own.dtype == getattr(torch, config.train.dtype)
        sent["gathered"] += (comm.size - 1) * own.numel()
        return gather(own, full)

    def counted_reduce(x: torch.Tensor, out: torch.Tensor, **options: Any) -> Any:
        assert x.dtype == torch.float32
        sent["reduced"] += (comm.size - 1) * out.numel()
        return reduce(x, out, **options)

    comm.start_all_gather, comm.start_reduce_scatter = counted_gather, counted_reduce  # type: ignore[method-assign]
    trainer.step.run(0)
    return sent["gathered"], sent["reduced"], sum(flat.numel() for flat in trainer.state.buckets.flat.values())


# Times that all weights are gathered, and all gradients reduced, in a step of m micro-batches.
@pytest.mark.parametrize(
    ("zero", "residency", "gathers", "reductions"),
    [
        (1, "auto", lambda m: 1, lambda m: 1),
        (2, "auto", lambda m: 1, lambda m: m),
        (3, "step", lambda m: 1, lambda m: m),
        (3, "use", lambda m: 2 * m, lambda m: m),
    ],
)
def test_traffic_is_what_the_plan_counts(
    ranks: RankPool, zero: int, residency: str, gathers: Callable[[int], int], reductions: Callable[[int], int]
) -> None:
    config = config_of(2, 1, 1, tied=False, kv_heads=2, num_micro_batches=6, zero=zero, residency=residency)
    config = replace(config, train=replace(config.train, dtype="bfloat16"))
    num_micro_batches = config.train.num_micro_batches
    for gathered, reduced, padded in ranks.run(traffic, 2, config):
        assert gathered == gathers(num_micro_batches) * padded // 2
        assert reduced == reductions(num_micro_batches) * padded // 2


SAVED, STEPS = 2, 3


def train_and_save(config: Config, run_dir: str) -> None:
    trainer = Trainer(config, open_corpus(config), CPU)
    for step in range(SAVED):
        trainer.step.run(step)
    check_finite(trainer.state)
    check_replicas(trainer.state, SAVED)
    saver = Saver(checkpoints_of(run_dir), keep=2)
    saver.save(
        SAVED,
        blocks_of(trainer.state),
        state_of(config, trainer.state.part.corpus.fingerprint(), SAVED, trainer.state.num_updates),
    )
    assert saver.wait() is None


def go_on(config: Config, run_dir: str) -> Outcome:
    trainer = resumed(config, run_dir, SAVED)
    numbers = [(result.loss, result.grad_norm) for result in map(trainer.step.run, range(SAVED, STEPS))]
    return numbers, pieces_of(trainer)


def straight(config: Config) -> Outcome:
    trainer = Trainer(config, open_corpus(config), CPU)
    numbers = [(result.loss, result.grad_norm) for result in map(trainer.step.run, range(STEPS))]
    return numbers[SAVED:], pieces_of(trainer)


CHANGES = [
    ((4, 1, 1, 3), (1, 2, 2, 0)),
    pytest.param((2, 2, 2, 1), (4, 1, 1, 2), marks=pytest.mark.slow),
    pytest.param((1, 1, 2, 0), (2, 2, 1, 3), marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), CHANGES)
def test_a_run_goes_on_at_another_stage_in_another_layout(
    ranks: RankPool, tmp_path: Path, first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    def of(dp: int, tp: int, pp: int, zero: int) -> Config:
        return config_of(dp, tp, pp, tied=True, kv_heads=1, zero=zero)

    reference = ranks.run(straight, 1, of(1, 1, 1, 0))[0]
    ranks.run(train_and_save, math.prod(first[:3]), of(*first), str(tmp_path))
    compare(ranks.run(go_on, math.prod(second[:3]), of(*second), str(tmp_path)), reference)


def resumed_without_masters(config: Config, run_dir: str) -> str:
    """Save a checkpoint whose masters were left out, and go on from it; return what is said."""
    trainer = Trainer(config, open_corpus(config), CPU)
    blocks = {
        name: block for name, block in blocks_of(trainer.state).items() if not name.startswith("optimizer.master.")
    }
    assert len(blocks) < len(blocks_of(trainer.state))
    saver = Saver(checkpoints_of(run_dir), keep=2)
    saver.save(
        SAVED, blocks, state_of(config, trainer.state.part.corpus.fingerprint(), SAVED, trainer.state.num_updates)
    )
    assert saver.wait() is None
    with pytest.raises(CheckpointError) as error:
        resumed(config, run_dir, SAVED)
    return str(error.value)


def test_a_checkpoint_without_masters_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    config = config_of(2, 1, 1, tied=False, kv_heads=2, zero=3)
    config = replace(config, train=replace(config.train, dtype="bfloat16"))
    for message in ranks.run(resumed_without_masters, 2, config, str(tmp_path)):
        assert "\n" not in message and "a checkpoint must hold every tensor of the model" in message
        assert " has no optimizer.master." in message
