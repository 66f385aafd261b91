"""Rung: gloo ranks. Fused products are compared exactly: right ones pass in every dtype, a changed bit does not.

What only several GPUs check: that links between them are right.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support import CountMutations
from support.ranks.rank_pool import RankPool
from torch import Tensor
from tpkernels.exchange.communicator import Communicator

from tpengine.doctor import products

CPU = torch.device("cpu")


def wrong(dtype: torch.dtype, arena_bytes: int) -> list[str]:
    assert dist.group.WORLD is not None
    return products.wrong_products(Communicator(dist.group.WORLD, arena_bytes=arena_bytes), CPU, dtype)


@pytest.mark.by_default("3-dtype0-0", "2-dtype1-1048576")
@pytest.mark.parametrize("arena_bytes", [0, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_right_products_are_exact(ranks: RankPool, world: int, dtype: torch.dtype, arena_bytes: int) -> None:
    assert ranks.run(wrong, world, dtype, arena_bytes) == [[]] * world


def wrong_with_a_fault(name: str) -> list[str]:
    """One element of one operator's output is off by one on rank 1."""
    right = getattr(products, name)

    def faulty(*args: Any, **others: Any) -> Any:
        y: Any = right(*args, **others)
        first: Tensor = y[0] if isinstance(y, tuple) else y
        if dist.get_rank() == 1:
            first.data.view(-1)[5] += 1.0
        return y

    with patch.object(products, name, faulty):
        return wrong(torch.float32, 1 << 20)


def test_one_wrong_element_is_found_on_its_rank(ranks: RankPool, count_mutations: CountMutations) -> None:
    for name in ("all_gather_matmul", "matmul_reduce_scatter"):
        first, second = ranks.run(wrong_with_a_fault, 2, name)
        assert first == [] and [line.split(":")[0] for line in second] == [name]
        assert "1 of" in second[0] and second[0].endswith("elements of y")
        count_mutations("fused products (doctor)", 1, 1)


def timed() -> list[dict[str, Any]]:
    assert dist.group.WORLD is not None
    return products.gains(CPU, torch.float32, [(8, 8), (9, 16)], dist.group.WORLD)


def test_what_is_gained_is_timed_by_size(ranks: RankPool) -> None:
    for found in ranks.run(timed, 2):
        assert [of["bytes"] for of in found] == [8 * 8 * 4.0, 8 * 16 * 4.0]
        assert all(min(of["fused"], of["apart"], of["alone"]) > 0 for of in found)
