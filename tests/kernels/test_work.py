"""Rung: pure. Work formulas against counts made the long way, predicted times against timelines walked step by step.

That the rates are those of a GPU, only a GPU shows.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from tpkernels.work import (
    RATES,
    Rates,
    Work,
    activation_backward_work,
    activation_work,
    adamw_work,
    all_gather_work,
    all_reduce_work,
    attention_backward_work,
    attention_work,
    cross_entropy_gradient_work,
    cross_entropy_work,
    embedding_backward_work,
    embedding_work,
    linear_cross_entropy_backward_work,
    linear_cross_entropy_work,
    link_seconds,
    matmul_seconds,
    matmul_work,
    norm_backward_work,
    norm_work,
    reduce_scatter_work,
    rope_work,
    visible_pairs,
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


def test_norm_reads_and_writes_each_row_once() -> None:
    """6 elements of 2 bytes, 2 rows of 3: x and y, w; one statistic per row."""
    assert norm_work(2, 3, 2) == Work(flops=24, memory_bytes=2 * (6 + 6 + 3) + 4 * 2)
    assert norm_work(2, 3, 2, residual=True) == Work(flops=30, memory_bytes=2 * (4 * 6 + 3) + 4 * 2)
    assert norm_work(2, 3, 2, centered=True) == Work(flops=42, memory_bytes=2 * (2 * 6 + 2 * 3) + 4 * 2 * 2)


def test_norm_backward_reads_two_rows_and_writes_one() -> None:
    assert norm_backward_work(2, 3, 2) == Work(flops=54, memory_bytes=2 * (3 * 6 + 2 * 3) + 4 * 2)
    assert norm_backward_work(2, 3, 2, residual=True) == Work(flops=60, memory_bytes=2 * (4 * 6 + 2 * 3) + 4 * 2)
    assert norm_backward_work(2, 3, 2, centered=True) == Work(flops=78, memory_bytes=2 * (3 * 6 + 3 * 3) + 4 * 2 * 2)


def test_rope_turns_every_pair_once() -> None:
    """5 tokens of 3 heads of 4 elements: 30 pairs, 4 products and 2 sums each; 2 cosines and 2 sines per token."""
    assert rope_work(5, 3, 4, 2) == Work(flops=30 * 6, memory_bytes=2 * 60 * 2 + 5 * 4 * 4)


def test_activations_read_their_halves() -> None:
    assert activation_work(2, 3, 2, gated=False) == Work(flops=24, memory_bytes=2 * (6 + 6))
    assert activation_work(2, 3, 2, gated=True) == Work(flops=30, memory_bytes=2 * (12 + 6))
    assert activation_backward_work(2, 3, 2, gated=False) == Work(flops=54, memory_bytes=2 * (6 + 6 + 6))
    assert activation_backward_work(2, 3, 2, gated=True) == Work(flops=66, memory_bytes=2 * (6 + 12 + 12))


def test_cross_entropy_reads_the_logits_and_then_overwrites_them() -> None:
    """2 tokens: a label of 8 bytes, and two float32, a token."""
    assert cross_entropy_work(2, 5, 2) == Work(flops=40, memory_bytes=20 + 32)
    assert cross_entropy_gradient_work(2, 5, 2) == Work(flops=30, memory_bytes=40 + 32)


def test_linear_cross_entropy_is_three_matmuls_without_their_logits() -> None:
    tokens, hidden, vocabulary = 6, 4, 5
    forward = linear_cross_entropy_work(tokens, hidden, vocabulary, 2)
    backward = linear_cross_entropy_backward_work(tokens, hidden, vocabulary, 2)
    logits = matmul_work(tokens, vocabulary, hidden, 2).flops
    dx, dw = matmul_work(tokens, hidden, vocabulary, 2).flops, matmul_work(vocabulary, hidden, tokens, 2).flops
    assert forward.flops == logits + cross_entropy_work(tokens, vocabulary, 2).flops
    assert backward.flops == dx + dw + cross_entropy_gradient_work(tokens, vocabulary, 2).flops
    assert forward.memory_bytes == 2 * (24 + 20) + 8 * 6 and backward.memory_bytes == 4 * (24 + 20) + 8 * 6


def test_embedding_copies_rows_and_its_gradient_is_dense() -> None:
    assert embedding_work(3, 4, 2) == Work(memory_bytes=2 * (12 + 12) + 24)
    assert embedding_backward_work(3, 10, 4, 2) == Work(flops=12, memory_bytes=2 * (12 + 40) + 24)


def test_adamw_reads_and_writes_three_states() -> None:
    assert adamw_work(10, 4) == Work(flops=140, memory_bytes=10 * (12 + 4 + 12))
    assert adamw_work(10, 2, 2) == Work(flops=140, memory_bytes=10 * 28)


def test_visible_pairs_counts_what_a_mask_leaves() -> None:
    for lengths in ([1], [7], [3, 5, 1]):
        for window in (None, 1, 2, 5, 7, 100):
            pairs = sum(
                1
                for length in lengths
                for query in range(length)
                for key in range(query + 1)
                if window is None or query - key < window
            )
            assert visible_pairs(lengths, window) == pairs


def test_attention_backward_has_five_products_for_forwards_two() -> None:
    for causal_half in (False, True):
        forward = attention_work(2, 8, 4, 2, 16, 2, causal_half=causal_half)
        backward = attention_backward_work(2, 8, 4, 2, 16, 2, causal_half=causal_half)
        assert 2 * backward.flops == 5 * forward.flops
    # q, y, dy, dq of 4 heads; k, v, dk, dv of 2; one float32 per query and head.
    assert backward.memory_bytes == 2 * (4 * 1024 + 4 * 512) + 4 * 64


def test_attention_of_given_pairs_counts_those_alone() -> None:
    everything = attention_work(2, 8, 4, 2, 16, 2, causal_half=False)
    assert attention_work(2, 8, 4, 2, 16, 2, causal_half=True, pairs=2 * 64) == everything
    pairs = 2 * visible_pairs([5, 3])
    assert attention_work(2, 8, 4, 2, 16, 2, causal_half=True, pairs=pairs).flops == 4 * 4 * 16 * pairs
    assert 2 * attention_backward_work(2, 8, 4, 2, 16, 2, causal_half=True, pairs=pairs).flops == 5 * 4 * 4 * 16 * pairs


def test_a_ring_sends_what_the_formulas_say() -> None:
    for world in (1, 2, 4, 8):
        shards = [1024] * world
        sent = sum(shards[1:])  # every shard but one passes through each rank's link
        assert all_gather_work(1024, world).link_bytes == sent
        assert reduce_scatter_work(1024 * world, world).link_bytes == sent
        assert all_reduce_work(1024 * world, world).link_bytes == 2 * sent
    assert all_reduce_work(4096, 1) == Work()


def test_a_matmul_takes_as_long_as_its_operations_or_its_bytes() -> None:
    rates = Rates(100.0, 10.0, 1.0, 0.0, 0.0)
    assert matmul_seconds(Work(flops=200, memory_bytes=10, link_bytes=1000), rates) == 2
    assert matmul_seconds(Work(flops=200, memory_bytes=50, link_bytes=1000), rates) == 5
    assert link_seconds(Work(flops=200, memory_bytes=50, link_bytes=7), rates) == 7


def test_rates_are_below_the_published_peaks() -> None:
    """H100: 650 TFLOP/s and 370 GB/s are what others reach; an H200 differs in its memory alone."""
    h100, h200 = RATES["H100"], RATES["H200"]
    assert h100.flops_per_s == pytest.approx(650e12, rel=0.01)
    assert h100.link_bytes_per_s == pytest.approx(370e9, rel=0.01)
    assert 2.7e12 < h100.memory_bytes_per_s < 3.35e12 and 3.9e12 < h200.memory_bytes_per_s < 4.8e12
    assert replace(h200, memory_bytes_per_s=h100.memory_bytes_per_s) == h100


@pytest.mark.parametrize(("m", "k"), [(16384, 8192), (4096, 4096)])
def test_a_matmul_of_1540_columns_takes_as_long_as_its_gather(m: int, k: int) -> None:
    """It does at 650 TFLOP/s, 370 GB/s and 8 ranks, whatever the other sizes; for a scatter 1540 is the depth."""
    rates = Rates(650e12, 4.8e12, 370e9, 0.0, 0.0)
    gather, scatter = all_gather_work(m // 8 * k * 2, 8), reduce_scatter_work(m * k * 2, 8)
    for columns, ratio in ((1537, 1.0), (2 * 1537, 2.0)):
        for matmul, exchange in ((matmul_work(m, columns, k, 2), gather), (matmul_work(m, k, columns, 2), scatter)):
            assert matmul_seconds(matmul, rates) / link_seconds(exchange, rates) == pytest.approx(ratio, rel=1e-3)
