"""Rung: gloo ranks. A bucket states its axes and is reduced over exactly their ranks; what is left, when a step ends.

Every rank fills its gradients with 64**rank. So the digits of a sum, in base 64, say whose gradients are in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.engine.exactness import exact_config
from support.engine.parity import config_of
from support.ranks.rank_pool import RankPool
from torch import Tensor
from tpkernels.exchange.communicator import Communicator

from tpengine.config import Config
from tpengine.data import open_corpus
from tpengine.distributed.mesh import Communicators, Shape
from tpengine.layout.parameters import kv_replicas
from tpengine.runs.trainer import Trainer

_BASE = 64


# Which axes a sum states, and whose gradients are in it.
Summed = tuple[tuple[str, ...], list[int]]


def ranks_in(values: Tensor, num_ranks: int) -> list[int]:
    """Return whose gradients are in a sum, each of them equally often in every element."""
    (value,) = {int(value) for value in values.reshape(-1).tolist()}
    counts = [value // _BASE**rank % _BASE for rank in range(num_ranks)]
    assert value and len(set(counts) - {0}) == 1, counts
    return [rank for rank, count in enumerate(counts) if count]


def summed(config: Config, broken: bool = False) -> tuple[dict[int, Summed], dict[str, Summed]]:
    """Return what is in each bucket after its reduction, and in each piece's gradient at the end of a step."""
    with pytest.MonkeyPatch.context() as patch:
        if broken:
            over = Communicators.over
            patch.setattr(
                Communicators, "over", lambda self, axes: over(self, axes) if axes == ("dp",) else Communicator(None)
            )
        trainer = Trainer(config, open_corpus(config), torch.device("cpu"))
    buckets, world = trainer.state.buckets, dist.get_world_size()
    trainer.state.gradients.begin()
    buckets.arm(list(buckets.flat))
    for index, flat in buckets.flat.items():
        # All blocks of micro-batches but the last are empty.
        for _ in range(0 if buckets.blocks is None else buckets.blocks.num_blocks - 1):
            buckets.end_block(index)
        flat.fill_(_BASE ** dist.get_rank())
    buckets.flush()
    for index in buckets.flat:
        buckets.wait(index)
    reduced = {}
    for index in buckets.flat:
        bucket = buckets[index]
        sums = bucket.views if bucket.cut is None else bucket.own_views
        if sums:
            reduced[index] = bucket.axes, ranks_in(torch.cat([s.reshape(-1) for s in sums.values()]), world)
    trainer.state.gradients.finish()
    pieces = trainer.state.model.pieces
    ended = {
        name: (pieces[name].spec.reduce_over, ranks_in(gradient, world))
        for name, gradient in trainer.state.gradients.of.items()
    }
    return reduced, ended


def ranks_of(axes: Sequence[str], rank: int, shape: Shape, replicas: int) -> list[int]:
    """Return the ranks that differ from a rank on these axes alone."""
    at, found = shape.coordinates(rank), []
    for other in range(shape.world_size):
        to = shape.coordinates(other)
        shares_heads = "replica" in axes and to.tp // replicas == at.tp // replicas
        on_tp = "tp" in axes or shares_heads or to.tp == at.tp
        on_dp = "dp" in axes or to.dp == at.dp
        if to.pp == at.pp and on_tp and on_dp:
            found.append(other)
    return found


def check(config: Config, by_rank: Sequence[Sequence[Mapping[Any, Summed]]]) -> set[tuple[str, ...]]:
    """Compare what is in the sums with the ranks of their axes; return the axes that there were."""
    shape = Shape.of(config.parallel)
    replicas = kv_replicas(config.model, shape.tp)
    seen = set()
    for rank, sums in enumerate(by_rank):
        for of in sums:
            assert of, "a rank has gradients"
            for name, (axes, ranks) in of.items():
                assert ranks == ranks_of(axes, rank, shape, replicas), f"{name} over {axes} on rank {rank}"
                seen.add(axes)
    return seen


NORMS, HEADS, OTHERS = ("dp", "tp"), ("dp", "replica"), ("dp",)
CONFIGS = {
    "whole": config_of(2, 2, 1, tied=True, kv_heads=1),
    "whole, heads on two of four": config_of(1, 4, 1, tied=True, kv_heads=2),
    "slices, once a step": config_of(2, 2, 1, tied=True, kv_heads=1, zero=1),
    "slices, each micro-batch": config_of(2, 2, 1, tied=True, kv_heads=1, zero=3),
    "exact": exact_config(2, 2, kv_heads=1, tied=True),
    "exact, blocks": exact_config(2, 2, kv_heads=1, tied=True, zero=2),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_bucket_is_reduced_over_the_ranks_of_its_axes(ranks: RankPool, name: str) -> None:
    config = CONFIGS[name]
    found = ranks.run(summed, 4, config)
    assert check(config, found) == {NORMS, HEADS, OTHERS}
    # A bucket of slices, or of shards, is reduced over the replicas alone.
    in_buckets = {axes for reduced, _ in found for axes, _ in reduced.values()}
    assert in_buckets == ({NORMS, HEADS, OTHERS} if name.startswith("whole") else {OTHERS})


@pytest.mark.by_default("whole")
@pytest.mark.parametrize("name", ["whole", "slices, once a step", "exact, blocks"])
def test_ranks_left_out_are_noticed(ranks: RankPool, name: str) -> None:
    """Nothing is summed but over the replicas."""
    found = ranks.run(summed, 4, CONFIGS[name], True)
    with pytest.raises(AssertionError, match=r"over \('dp', '(tp|replica)'\) on rank 0"):
        check(CONFIGS[name], found)
