"""Rung: gloo ranks. One product for the gradients of weights that one matmul reads, in every layout, as on CUDA.

Gradients of a step in float32 err from float64's by at most twice as much as those of single products, per tensor. By
default each axis, stage of ZeRO and schedule that splits weight gradients off, once; `pytest -m slow` has the whole
product. That it is faster only a GPU shows (benchmarks/gpu/cases/kernels/tiles.py).
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.engine.parity import config_of
from support.ranks.rank_pool import RankPool
from torch import Tensor

from tpengine.commands import certify_witness
from tpengine.commands.certify_compare import Tensors, assembled
from tpengine.commands.certify_witness import Gradients, Values
from tpengine.config import Config
from tpengine.layers import gradient_sink
from tpengine.runs.trainer import Trainer

Case = tuple[tuple[int, int, int], int, str, int]
# (dp, tp, pp), stage of ZeRO, schedule, KV heads: one for two ranks of tp is held by both.
BY_DEFAULT: list[Case] = [
    ((1, 2, 1), 0, "1f1b", 1),
    ((2, 1, 1), 1, "1f1b", 2),
    ((2, 1, 1), 2, "1f1b", 2),
    ((2, 1, 1), 3, "1f1b", 2),
    ((1, 1, 2), 0, "zb-h1", 2),
    ((1, 1, 2), 0, "zbv", 2),
]
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
EVERY: list[Case] = [
    (layout, zero, schedule, kv_heads)
    for layout, zero, schedule, kv_heads in itertools.product(
        LAYOUTS, range(4), ("1f1b", "interleaved", "zb-h1", "zbv"), (1, 2)
    )
    # ZeRO needs replicas; alone on its stage a rank runs the same actions in every schedule but interleaved.
    if (layout[0] > 1 or not zero) and (layout[2] > 1 or schedule in ("1f1b", "interleaved"))
]
CASES = [pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.slow) for case in EVERY]
UNIT = float(np.finfo(np.float32).eps) / 2


def config(layout: tuple[int, int, int], zero: int, schedule: str, kv_heads: int, dtype: str = "float32") -> Config:
    base = config_of(
        *layout, tied=False, kv_heads=kv_heads, num_layers=4, schedule=schedule, zero=zero, tp_comm="plain"
    )
    return replace(base, train=replace(base.train, dtype=dtype))


def first_gradients(config: Config, packs: bool) -> tuple[list[Values], Counter[tuple[int, ...]]]:
    """Return this rank's gradients of the first step, from weights in float32; products by their gradients' shapes."""
    products: Counter[tuple[int, ...]] = Counter()
    add = gradient_sink.accumulate_wgrad

    def counted(buffer: Tensor, dy: Tensor, x: Tensor) -> None:
        products[tuple(buffer.shape)] += 1
        add(buffer, dy, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certify_witness, "Trainer", functools.partial(Trainer, packs_gradients=packs))
        patch.setattr(gradient_sink, "accumulate_wgrad", counted)
        return Gradients(config, "float32").step(0), products


def whole(of_ranks: Sequence[tuple[list[Values], Counter[tuple[int, ...]]]]) -> Tensors:
    return assembled(values for rank, _ in of_ranks for values in rank)


@pytest.fixture(scope="module")
def in_float64(ranks: RankPool) -> dict[int, Tensors]:
    """What one process has in float64, by KV heads."""
    return {
        kv_heads: whole(ranks.run(first_gradients, 1, config((1, 1, 1), 0, "1f1b", kv_heads, "float64"), False))
        for kv_heads in (1, 2)
    }


@pytest.mark.by_default("layout13-2-1f1b-2", "layout29-0-zb-h1-2")
@pytest.mark.parametrize(("layout", "zero", "schedule", "kv_heads"), CASES)
def test_packed_gradients_are_at_most_twice_as_wrong(
    ranks: RankPool,
    in_float64: dict[int, Tensors],
    layout: tuple[int, int, int],
    zero: int,
    schedule: str,
    kv_heads: int,
) -> None:
    dp, tp, pp = layout
    asked = config(layout, zero, schedule, kv_heads)
    packed, single = (ranks.run(first_gradients, dp * tp * pp, asked, packs) for packs in (True, False))
    # What was launched: a block's four products, instead of seven, of each of the replica's micro-batches.
    model, chunks = asked.model, asked.train.num_micro_batches
    heads, width, ffn = model.head_size, model.hidden_size, model.ffn_size // tp
    keys = max(1, kv_heads // tp) * heads
    is_shared = tp > kv_heads and not zero
    mixed = width // tp
    attention = [(mixed, width), (2 * keys, width)] if is_shared else [(mixed + 2 * keys, width)]
    of_block = Counter([*attention, (2 * ffn, width), (width, mixed), (width, ffn)])
    of_head = Counter({(-(-model.vocab_size // 8) * 8 // tp, width): chunks})
    launched = sum((products for _, products in packed), Counter())
    per_block = Counter({shape: number * chunks * model.num_layers for shape, number in of_block.items()})
    assert launched == Counter({shape: number * dp * tp for shape, number in (per_block + of_head).items()})
    assert sum((products for _, products in single), Counter()).total() - launched.total() == (
        (2 if is_shared else 3) * chunks * model.num_layers * dp * tp
    )
    # How wrong they are.
    got, of_torch, right = whole(packed), whole(single), in_float64[kv_heads]
    assert got.keys() == of_torch.keys() == right.keys()
    for name, wanted in right.items():
        rows = slice(0, min(len(tensors[name]) for tensors in (got, of_torch, right)))
        wanted = wanted[rows]
        error, allowed = (float(np.linalg.norm(tensors[name][rows] - wanted)) for tensors in (got, of_torch))
        assert error <= 2 * max(allowed, UNIT * float(np.linalg.norm(wanted))), (name, error, allowed)


def launched_by_default(config: Config, device: str) -> tuple[list[tuple[int, ...]], bool]:
    """Return the matrices that buckets have packed, and whether the layout says that there are some."""
    trainer = Trainer(config, certify_witness.open_corpus(config), torch.device(device))
    packs = [names for bucket in trainer.state.part.layout.buckets.values() for names in bucket.layout.packs]
    return [tuple(matrix.shape) for matrix in trainer.state.buckets.packs.values()], bool(packs)


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_a_cpu_and_exact_mode_keep_single_products(ranks: RankPool, reduction: str) -> None:
    asked = config((1, 1, 1), 0, "1f1b", 2)
    asked = replace(asked, train=replace(asked.train, reduction=reduction))  # type: ignore[arg-type]
    assert ranks.run(launched_by_default, 1, asked, "cpu") == [([], False)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_packs() -> None:
    """Said by the device, whatever the configuration says."""
    matrices, is_declared = launched_by_default(config((1, 1, 1), 0, "1f1b", 2), "cuda")
    assert is_declared and len(matrices) == 2 * 4
