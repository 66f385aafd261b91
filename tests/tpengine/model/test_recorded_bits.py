"""Rung: one process. Exact mode's bits are those that were recorded; that layouts have the same is test_exact.py's.

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
from support.engine.exactness import exact_config, train
from support.ranks.rank_pool import RankPool

from tpengine.config import Config, validate
from tpengine.config.presets import preset_config

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


@pytest.mark.by_default("tiny", "float64, a KV head for each shard")
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_recorded(ranks: RankPool, name: str) -> None:
    numbers, digests = ranks.run(train, 1, CASES[name])[0]
    got: Any = hashlib.sha256(repr((numbers, sorted(digests.items()))).encode()).hexdigest()[:16]
    losses, bits = RECORDED[name]
    # Elsewhere the text may be another one.
    assert [float.fromhex(loss) for loss, _ in numbers] == pytest.approx(losses, rel=5e-2)
    assert got == bits.get(machine(), got), machine()
