"""Rung: pure. Work formulas of experts' operators against counts made the long way."""

from __future__ import annotations

from tpkernels.work import Work, activation_backward_work, activation_work, matmul_work
from tpkernels.work_experts import (
    combine_rows_backward_work,
    combine_rows_work,
    combine_work,
    crossing_rows,
    dispatch_work,
    grouped_matmul_work,
    grouped_swiglu_backward_work,
    grouped_swiglu_work,
    grouped_wgrad_work,
    hottest_share,
    route_backward_work,
    route_work,
    sort_by_expert_work,
    take_rows_backward_work,
    take_rows_work,
)


def test_experts_products_read_the_weights_that_have_rows() -> None:
    """6 rows of 4, experts of 3 x 4 elements, of which 2 have rows; 2 bytes an element, sums of 4."""
    assert grouped_matmul_work(6, 3, 4, 2, 2) == Work(flops=144, memory_bytes=2 * (24 + 18 + 24))
    assert grouped_wgrad_work(6, 3, 4, 2, 2) == Work(flops=144, memory_bytes=2 * (18 + 24) + 2 * 4 * 24)
    gate_and_up = grouped_matmul_work(6, 3, 4, 2, 2) + grouped_matmul_work(6, 3, 4, 2, 2)
    forward = grouped_swiglu_work(6, 3, 4, 2, 2)
    assert forward.flops == gate_and_up.flops + activation_work(6, 3, 2, gated=True).flops
    assert forward.memory_bytes == 2 * (24 + 18 + 36 + 48)
    assert grouped_swiglu_work(6, 3, 4, 2, 2, keeps_y=False).memory_bytes == 2 * (24 + 18 + 48)
    backward = grouped_swiglu_backward_work(6, 3, 4, 2, 2)
    assert backward.flops == gate_and_up.flops + activation_backward_work(6, 3, 2, gated=True).flops
    assert backward.memory_bytes == 2 * (18 + 36 + 36 + 24 + 48)


def test_a_router_is_products_and_a_softmax() -> None:
    """5 tokens of 8 columns, 6 experts of which each token chooses 2: 10 choices, 4 bytes each number but x and w."""
    forward, backward = route_work(5, 8, 6, 2, 2), route_backward_work(5, 8, 6, 2, 2)
    assert forward.flops == matmul_work(5, 6, 8, 2).flops + 4 * 30
    assert forward.memory_bytes == 2 * (40 + 48) + 4 * (30 + 10 + 10 + 6)
    assert backward.flops == matmul_work(5, 8, 6, 2).flops + matmul_work(6, 8, 5, 2).flops + 3 * 30
    assert backward.memory_bytes == 4 * (40 + 48) + 4 * (30 + 10 + 10 + 10)
    assert sort_by_expert_work(10, 6) == Work(memory_bytes=4 * (10 + 10 + 7))


def test_rows_of_experts_are_taken_and_combined_once() -> None:
    """5 tokens of 8 columns, 2 rows each: 80 elements of rows, 40 of tokens, 10 places."""
    assert take_rows_work(5, 2, 8, 2) == Work(memory_bytes=2 * (40 + 80) + 4 * 10)
    assert take_rows_backward_work(5, 2, 8, 2) == Work(flops=80, memory_bytes=2 * (40 + 80) + 4 * 10)
    assert combine_rows_work(5, 2, 8, 2) == Work(flops=160, memory_bytes=2 * (40 + 80) + 4 * 20)
    assert combine_rows_backward_work(5, 2, 8, 2) == Work(flops=240, memory_bytes=2 * (40 + 160) + 4 * 30)


def test_rows_to_experts_and_back_row_by_row() -> None:
    """Two ranks of 3 tokens with 2 choices, four experts; ranks own experts 0, 1 and 2, 3."""
    chosen = [[(0, 1), (0, 2), (0, 3)], [(1, 0), (0, 1), (3, 2)]]
    counts = [[sum(pair.count(e) for pair in of_rank) for e in range(4)] for of_rank in chosen]
    leaving = [sum(e // 2 != rank for pair in of_rank for e in pair) for rank, of_rank in enumerate(chosen)]
    assert [crossing_rows(counts, rank) for rank in range(2)] == [(leaving[0], leaving[1]), (leaving[1], leaving[0])]
    rows = [sum(e // 2 == rank for of_rank in chosen for pair in of_rank for e in pair) for rank in range(2)]
    # 5 columns of 2 bytes.
    assert dispatch_work(rows[0], leaving[0], 5, 2) == Work(0, 2 * 10 * rows[0], 10 * leaving[0])
    # A bound of 50 rows: the others are written, zeros.
    tail = 50 - rows[0]
    assert dispatch_work(rows[0], leaving[0], 5, 2, tail=tail) == Work(0, 10 * (50 + rows[0]), 10 * leaving[0])
    assert combine_work(3, 2, leaving[1], 5, 2) == Work(6 * 2 * 5, 10 * (6 + 3) + 4 * 6, 10 * leaving[1])
    assert hottest_share([sum(of_expert) for of_expert in zip(*counts, strict=True)], 2) == max(rows) / 6
    assert hottest_share([7, 0, 0, 0], 4) == 4 and hottest_share([3] * 6, 3) == hottest_share([0] * 4, 2) == 1
