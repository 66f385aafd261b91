"""Fixtures of the fused operators' tests on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.ranks.gpu_ranks import Run
from support.ranks.rank_pool import RankPool


@pytest.fixture(scope="module")
def run(interpreters: RankPool) -> Iterator[Run]:
    """`run(device, world, program, *args)`: program(device, *args) on every rank, which share the GPU."""
    # For each number of ranks: those of a smaller group would have allocated more often than the others.
    pools: dict[int, RankPool] = {}

    def run_on(device: str, world: int, program: Callable[..., Any], *args: Any) -> list[Any]:
        if device == "cpu":
            return interpreters.run(program, world, device, *args)
        if world not in pools:
            pools[world] = RankPool({"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"})
        return pools[world].run(program, world, device, *args)

    yield run_on
    for pool in pools.values():
        pool.close()
