"""Rung: gloo ranks. The most that a rank holds in a step, counted by torch's allocator, is what the simulator says.

Counted is what torch allocates on the thread that trains: every tensor, however short its life. Not counted, because
the allocator does not make it: memory that ranks share to exchange tensors, which a run's first lines and profile.json
state on their own; what a matrix library takes inside a product; and the slice in which the thread of a communicator
adds up a sum.

What only GPUs check: what torch.cuda counts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engine.parity import config_of
from support.ranks.rank_pool import RankPool
from tpkernels.ops.matmul import host

from benchmarks.harness.allocations import Allocations
from tpengine.config import Config, validate
from tpengine.config.settings import ModelDetails, RopeScaling
from tpengine.data import open_corpus
from tpengine.data_parallel.buckets import GradientBuckets
from tpengine.planner.modelled import caches
from tpengine.planner.modelled.memory import memory_of
from tpengine.runs.trainer import Trainer

CPU = torch.device("cpu")


def peaks(config: Config) -> tuple[int, int]:
    """The bytes that this rank held at most in its second step, and what was predicted."""
    with Allocations() as counted:
        trainer = Trainer(config, open_corpus(config), CPU)
        trainer.step.run(0)
        with counted.here():
            trainer.step.run(1)
    return counted.peak_bytes(), memory_of(config, trainer.state.part.layout, trainer.state.part.plan)[
        trainer.state.rank.mesh.at.pp
    ].peak


def peaks_with_a_double(config: Config) -> tuple[int, int]:
    """The same where every whole gradient buffer leaves a copy behind until its sum is there."""
    arm, doubles = GradientBuckets.arm, []

    def armed(buckets: GradientBuckets, order: Any, on_start: Any = None) -> None:
        doubles.clear()
        arm(buckets, order, on_start)
        doubles.extend(buckets.flat[index].clone() for index in order)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientBuckets, "arm", armed)
        return peaks(config)


def config_for(zero: int, schedule: str, dtype: str, **changes: Any) -> Config:
    """A model in which weights, states and what micro-batches keep are all of one size, a few MB in all."""
    config = config_of(2, 1, 2, tied=False, schedule=schedule, zero=zero, **{"kv_heads": 4, "num_layers": 4, **changes})
    model = replace(config.model, hidden_size=64, ffn_size=192, vocab_size=256)
    parallel = replace(config.parallel, bucket_bytes=200_000)
    train = replace(config.train, seq_len=64, num_micro_batches=4, dtype=dtype)
    return replace(config, model=model, parallel=parallel, train=train)


def check(found: list[tuple[int, int]]) -> None:
    for rank, (measured, predicted) in enumerate(found):
        assert abs(measured / predicted - 1) <= 0.05, f"rank {rank}: {measured:,} bytes measured, {predicted:,} said"


# By default what holds most at once and frees most often.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "schedule", "dtype"),
    [
        pytest.param(
            zero, schedule, dtype, marks=() if (zero, schedule, dtype) == (3, "zbv", "float32") else pytest.mark.slow
        )
        for zero in range(4)
        for schedule in ("1f1b", "zbv")
        for dtype in ("float32", "bfloat16")
    ],
)
def test_the_peak_is_the_simulators(ranks: RankPool, zero: int, schedule: str, dtype: str) -> None:
    check(ranks.run(peaks, 4, config_for(zero, schedule, dtype)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"residency": "use"},
        {"recompute": "attention"},
        {"recompute": "block"},
        {"recompute": "full"},
        {"schedule": "interleaved"},
        {"schedule": "gpipe", "residency": "use"},
        {"kv_heads": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_is_the_simulators_with_other_settings(ranks: RankPool, dtype: str, changes: dict[str, Any]) -> None:
    check(ranks.run(peaks, 4, config_for(**{"zero": 3, "schedule": "1f1b", "dtype": dtype, **changes})))


# What blocks of other architectures keep: windows, learned positions and no gate, norms of what a half adds. Sequences
# are so long that attention holds most where its scores are written out.
EXPERTS = ModelDetails(num_experts=4, experts_per_token=2, expert_ffn_size=96, normalizes_scores=True)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"ffn_size": 64, "details": ModelDetails(windows=(16,) * 4)},
    "gpt2": {"tie_embeddings": True, "details": ModelDetails(max_positions=256)},
    "gemma3": {
        "tie_embeddings": True,
        "num_kv_heads": 2,
        "details": ModelDetails(windows=(16, 16, 16, 0), local_rope_theta=1e4, head_size=16),
    },
    "granite": {"details": ModelDetails(residual_multiplier=0.22, logits_scaling=8.0, attention_scale=0.1)},
    "smollm3": {"details": ModelDetails(rotates=(True, True, True, False))},
    "olmo3": {"details": ModelDetails(windows=(16, 16, 16, 0), local_rope_theta=1e4)},
    "ministral3": {"details": ModelDetails(rope=RopeScaling("yarn", 4.0, 64, llama_4_scaling_beta=0.1))},
    "phi3": {"details": ModelDetails(rope=RopeScaling(partial_rotary_factor=0.75))},
    "qwen3_moe": {"details": replace(EXPERTS, has_experts=(True, False, True, True))},
    "mixtral": {"details": replace(EXPERTS, expert_ffn_size=192, experts_per_token=1)},
}
BY_DEFAULT = {("mistral", "float32"), ("gpt2", "bfloat16"), ("gemma3", "float32")}


@pytest.mark.by_default("mistral-float32")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) in BY_DEFAULT else pytest.mark.slow)
        for name in ARCHITECTURES
        for dtype in ("float32", "bfloat16")
    ],
)
def test_the_peak_is_the_simulators_for_each_architecture(ranks: RankPool, name: str, dtype: str) -> None:
    config = config_of(1, 1, 1, tied=False, kv_heads=4, num_layers=4)
    sizes = {"hidden_size": 64, "ffn_size": 192, "vocab_size": 256} | ARCHITECTURES[name]
    model = replace(config.model, architecture=name, **sizes)
    train = replace(config.train, seq_len=256, num_micro_batches=2, dtype=dtype)
    check(ranks.run(peaks, 1, validate(replace(config, model=model, train=train), 1)))


# Every token goes to all experts, so that each rank gets the rows that the simulator counts with.
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("layout", "ep", "changes"),
    [
        ((1, 2, 1), 2, {}),
        ((2, 1, 1), 2, {}),
        ((2, 2, 1), 4, {"zero": 3}),
        ((2, 2, 1), 2, {"zero": 2, "recompute": "full"}),
        ((2, 1, 2), 2, {"schedule": "zb-h1", "recompute": "block"}),
    ],
    ids=str,
)
def test_the_peak_is_the_simulators_where_rows_travel(
    ranks: RankPool, layout: tuple[int, int, int], ep: int, changes: dict[str, Any], dtype: str
) -> None:
    config = config_of(*layout, tied=False, kv_heads=4, num_layers=4, **changes)
    details = replace(EXPERTS, experts_per_token=4, has_experts=(True, False, True, True))
    sizes: dict[str, Any] = {"hidden_size": 64, "ffn_size": 192, "vocab_size": 256, "details": details}
    model = replace(config.model, architecture="qwen3_moe", **sizes)
    parallel = replace(config.parallel, ep=ep, bucket_bytes=200_000)
    train = replace(config.train, seq_len=64, num_micro_batches=4, dtype=dtype)
    config = replace(config, model=model, parallel=parallel, train=train)
    world = layout[0] * layout[1] * layout[2]
    check(ranks.run(peaks, world, validate(config, world)))


# Matrices that are large enough to be copied for a CPU's matmuls: each has two copies, as large as itself.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "reduction"),
    [
        ((1, 1, 2), "fast"),
        pytest.param((2, 1, 1), "fast", marks=pytest.mark.slow),
        pytest.param((1, 2, 1), "fast", marks=pytest.mark.slow),
        pytest.param((1, 2, 1), "exact", marks=pytest.mark.slow),
        pytest.param((2, 1, 1), "exact", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_weights_that_are_copied_for_matmuls_are_counted(
    ranks: RankPool, layout: tuple[int, int, int], reduction: str
) -> None:
    config = config_of(*layout, tied=False, kv_heads=4, num_layers=2)
    model = replace(config.model, hidden_size=256, ffn_size=512, vocab_size=256)
    train = replace(config.train, seq_len=128, num_micro_batches=2, dtype="float32", reduction=reduction)
    found = ranks.run(peaks, 2, replace(config, model=model, train=train))
    if reduction == "fast":
        check(found)
    else:
        # What exact mode keeps of a micro-batch is an estimate.
        assert all(abs(measured / predicted - 1) < 0.2 for measured, predicted in found), found


def test_the_same_matrices_are_copied() -> None:
    assert caches.FEWEST_MULTIPLICATIONS == host.FEWEST_MULTIPLICATIONS


@pytest.mark.slow
def test_a_buffer_that_is_left_behind_is_noticed(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="bytes measured"):
        check(ranks.run(peaks_with_a_double, 4, config_for(3, "1f1b", "float32")))
