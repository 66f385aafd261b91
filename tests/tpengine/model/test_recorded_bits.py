"""Rung: gloo ranks. Exact mode's bits are those that were recorded; that layouts have the same is test_exact.py's.

By default of one process after 3 steps. `pytest -m slow` has drawn configurations of 2 to 4 ranks after 20:
architectures, layouts, schedules, stages of ZeRO, KV heads and sizes of buckets.

A change that alters the bits of all layouts alike, such as another order of a sum, fails here. Bits belong to a
processor, a Python (its standard library is the text) and a torch: on another machine the losses are compared, and
bits only if that machine's are recorded too. If a change of bits is meant, copy what the failure shows.
"""

from __future__ import annotations

import hashlib
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.exactness import exact_config, merge, num_ranks, train
from support.ranks.rank_pool import RankPool

from tpengine.config import Config, validate
from tpengine.config.presets import preset_config
from tpengine.config.settings import ModelDetails

# Where bits were recorded.
_EPYC = "AMD EPYC AVX2, python 3.11.7, torch 2.13.0+cpu"
# Per case: the losses; and by machine the first 16 digits of the SHA-256 of all weights, gradients, moments, losses and
# norms.
RECORDED: dict[str, tuple[list[float], dict[str, str]]] = {
    "tied, dropout": ([5.79445398, 5.38355937, 5.27430934], {_EPYC: "18a12d1c786d2d9b"}),
    "bfloat16": ([5.79415961, 5.38148872, 5.27419539], {_EPYC: "69c7b207933ec44b"}),
    "float64, a KV head for each shard": ([5.81268746, 5.41022416, 5.22236573], {_EPYC: "89dc14f355194fb0"}),
    "8 shards and blocks": ([5.73299656], {_EPYC: "ebfaf211225c16a2"}),
    "tiny": ([6.00249648, 5.32171965, 4.67713058], {_EPYC: "9eb35fa4002368df"}),
}


def machine() -> str:
    """What bits depend on."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = models[0].partition(": ")[2] if models else platform.processor()
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{processor} {capability}, python {platform.python_version()}, torch {torch.__version__}"


def tiny() -> Config:
    """The default run, of 3 steps."""
    config = preset_config("tiny")
    return validate(replace(config, train=replace(config.train, reduction="exact", steps=3), device="cpu"), 1)


CASES: dict[str, Config] = {
    "tied, dropout": exact_config(),
    "bfloat16": exact_config(dtype="bfloat16"),
    "float64, a KV head for each shard": exact_config(dtype="float64", tied=False, kv_heads=4, dropout=0.0),
    "8 shards and blocks": exact_config(heads=8, micro_batches=8, steps=1),
    "tiny": tiny(),
}


@pytest.mark.by_default("float64, a KV head for each shard")
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_recorded(ranks: RankPool, name: str) -> None:
    numbers, digests = ranks.run(train, 1, CASES[name])[0]
    got: Any = hashlib.sha256(repr((numbers, sorted(digests.items()))).encode()).hexdigest()[:16]
    losses, bits = RECORDED[name]
    # Elsewhere the text may be another one.
    assert [float.fromhex(loss) for loss, _ in numbers] == pytest.approx(losses, rel=5e-2)
    assert got == bits.get(machine(), got), machine()


# What architectures need beside sizes, and what is drawn of it by hand: a window in half of the layers.
DETAILS = {
    "llama": ModelDetails(mlp_bias=True),
    "qwen2": ModelDetails(),
    "qwen3": ModelDetails(head_size=6),
    "mistral": ModelDetails(windows=(5,) * 4),
    "gpt2": ModelDetails(max_positions=24),
    "gemma3": ModelDetails(head_size=6, windows=(7, 0, 7, 0), local_rope_theta=100.0),
}


def drawn_config(architecture: str, **settings: Any) -> Config:
    """A configuration of 20 steps; `settings` are exact_config's, and the size of buckets."""
    parallel = {"bucket_bytes": settings.pop("bucket_bytes")}
    base = exact_config(layers=4, steps=20, **settings)
    model = replace(base.model, architecture=architecture, details=DETAILS[architecture])
    return validate(replace(base, model=model, parallel=replace(base.parallel, **parallel)), num_ranks(base))


# Drawn once; together they have every architecture, schedule and stage of ZeRO, and axes of 2 and 4. Of each by machine
# the first 16 digits of the SHA-256 of all weights after 20 steps. Revision 6da7eea gives the same.
DRAWN: list[tuple[Config, dict[str, str]]] = [
    (
        drawn_config("gemma3", dp=2, zero=2, kv_heads=4, tied=False, micro_batches=8, bucket_bytes=4_000),
        {_EPYC: "44dfa719dc842d3f"},
    ),
    (
        drawn_config(
            "qwen3", dp=2, pp=2, zero=1, schedule="zb-h1", recompute="block", micro_batches=8, bucket_bytes=40_000
        ),
        {_EPYC: "0d69d7f2c3c480ab"},
    ),
    (
        drawn_config("llama", tp=4, kv_heads=1, micro_batches=8, bucket_bytes=25_000_000),
        {_EPYC: "22b2cc769be8197c"},
    ),
    (
        drawn_config(
            "gpt2",
            tp=2,
            pp=2,
            schedule="zbv",
            recompute="block",
            kv_heads=4,
            dtype="bfloat16",
            tied=False,
            micro_batches=8,
            bucket_bytes=40_000,
        ),
        {_EPYC: "674e271fb0e42824"},
    ),
    (
        drawn_config(
            "gpt2",
            dp=2,
            pp=2,
            zero=2,
            schedule="interleaved",
            recompute="block",
            tied=False,
            micro_batches=8,
            bucket_bytes=4_000,
        ),
        {_EPYC: "cf67c56240b46314"},
    ),
    (
        drawn_config(
            "llama",
            dp=2,
            pp=2,
            zero=3,
            schedule="zbv",
            recompute="block",
            kv_heads=1,
            tied=False,
            micro_batches=8,
            bucket_bytes=4_000,
        ),
        {_EPYC: "2efc3d9f42762af5"},
    ),
    (
        drawn_config(
            "qwen2",
            pp=4,
            schedule="gpipe",
            recompute="block",
            kv_heads=1,
            dtype="bfloat16",
            tied=False,
            micro_batches=8,
            bucket_bytes=40_000,
        ),
        {_EPYC: "a87d6b806ec2e21c"},
    ),
    (
        drawn_config(
            "mistral",
            tp=2,
            dp=2,
            zero=1,
            recompute="block",
            kv_heads=4,
            dtype="bfloat16",
            bucket_bytes=25_000_000,
        ),
        {_EPYC: "bd086abafea19888"},
    ),
]


@pytest.mark.slow  # a minute each
@pytest.mark.parametrize(("config", "recorded"), DRAWN, ids=[config.model.architecture for config, _ in DRAWN])
def test_weights_after_20_steps_are_those_recorded(ranks: RankPool, config: Config, recorded: dict[str, str]) -> None:
    found = merge(config, ranks.run(train, num_ranks(config), config))
    losses = [float.fromhex(loss) for loss, _ in found.numbers]
    assert len(losses) == 20 and sum(losses[-5:]) < sum(losses[:5])
    weights = sorted((name, shard, bits) for (name, shard, kind), bits in found.digests.items() if kind == "weight")
    got = hashlib.sha256(repr(weights).encode()).hexdigest()[:16]
    assert got == recorded.get(machine(), got), machine()
