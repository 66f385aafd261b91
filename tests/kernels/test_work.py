"""Rung: pure. Work formulas against counts made the long way."""

from __future__ import annotations

import itertools

from tpkernels.work import (
    Work,
    all_gather_work,
    all_reduce_work,
    attention_work,
    matmul_work,
    reduce_scatter_work,
)


def test_matmul_counts_every_multiply_add() -> None:
    m, n, k = 3, 5, 7
    multiply_adds = sum(1 for _ in itertools.product(range(m), range(n), range(k)))
    assert matmul_work(m, n, k, 4) == Work(2 * multiply_adds, 4 * (m * k + k * n + m * n))


def test_attention_counts_both_products() -> None:
    full = attention_work(2, 8, 4, 2, 16, 4, causal_half=False)
    scores = matmul_work(8, 8, 16, 4).flops
    mixing = matmul_work(8, 16, 8, 4).flops
    assert full.flops == 2 * 4 * (scores + mixing)
    assert full.memory_bytes == 4 * 2 * 8 * 16 * (4 + 2 + 2 + 4)
    assert attention_work(2, 8, 4, 2, 16, 4, causal_half=True).flops * 2 == full.flops


def test_a_ring_sends_what_the_formulas_say() -> None:
    for world in (1, 2, 4, 8):
        shards = [1024] * world
        sent = sum(shards[1:])  # every shard but one passes through each rank's link
        assert all_gather_work(1024, world).link_bytes == sent
        assert reduce_scatter_work(1024 * world, world).link_bytes == sent
        assert all_reduce_work(1024 * world, world).link_bytes == 2 * sent
    assert all_reduce_work(4096, 1) == Work()
