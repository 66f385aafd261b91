"""Work of experts' operators: routers, the order of rows, grouped products, and rows on their way to other ranks.

Conventions are those of work.py; what an exchange moves depends on how rows are routed, hence crossing_rows and
hottest_share.
"""

from __future__ import annotations

from collections.abc import Sequence

from tpkernels.work import FLOAT_BYTES, Work

_LINE_BYTES = 64


def grouped_matmul_work(rows: int, n: int, k: int, experts: int, item_bytes: int) -> Work:
    """Return the work of y[rows, n], each row of x[rows, k] times its expert's weight of n * k elements.

    Bytes: x and y, and the weights of `experts`, those that have rows.
    """
    return Work(flops=2 * rows * n * k, memory_bytes=item_bytes * (rows * (k + n) + experts * n * k))


def grouped_wgrad_work(
    rows: int, out: int, inner: int, experts: int, item_bytes: int, sum_item_bytes: int = FLOAT_BYTES
) -> Work:
    """Return the work of dw[e] += dy_e.T @ x_e over all rows of dy[rows, out] and x[rows, inner].

    Bytes: dy and x; the sums of `experts`, those that have rows, are read and written.
    """
    memory = item_bytes * rows * (out + inner) + 2 * sum_item_bytes * experts * out * inner
    return Work(flops=2 * rows * out * inner, memory_bytes=memory)


def grouped_swiglu_work(
    rows: int, features: int, hidden: int, experts: int, item_bytes: int, *, keeps_y: bool = True
) -> Work:
    """Return the work of h[rows, features] from x[rows, hidden] and the gate and up of its rows' experts.

    Operations: two products, and 5 per element of h, as activation_work.
    Bytes: x, h and the weights of `experts`, those that have rows; gate and up are written if backward will need them.
    """
    memory = rows * (hidden + features * (3 if keeps_y else 1)) + 2 * experts * features * hidden
    return Work(flops=(4 * hidden + 5) * rows * features, memory_bytes=item_bytes * memory)


def grouped_swiglu_backward_work(rows: int, features: int, hidden: int, experts: int, item_bytes: int) -> Work:
    """Return the work of dx[rows, hidden] and dy[rows, 2 * features] from dh, gate and up.

    The gradients of the weights are two of grouped_wgrad_work.
    Operations: 11 per element of dh, as activation_backward_work, and two products.
    Bytes: dh, gate and up read, their gradients and dx written; the weights of `experts`, those that have rows.
    """
    memory = rows * (hidden + 5 * features) + 2 * experts * features * hidden
    return Work(flops=(4 * hidden + 11) * rows * features, memory_bytes=item_bytes * memory)


def route_work(tokens: int, hidden: int, num_experts: int, top_k: int, item_bytes: int) -> Work:
    """Return the work of a router: logits[tokens, num_experts], scores, the top_k of each token and their weights.

    Operations: the product; per logit as `cross_entropy_work`, maximum, difference, exponential, sum.
    Bytes: x and the weight read; float32 logits written, int32 experts and float32 weights; a count per expert.
    """
    choices = tokens * (num_experts + 2 * top_k) + num_experts
    return Work(
        flops=(2 * hidden + 4) * tokens * num_experts,
        memory_bytes=item_bytes * (tokens + num_experts) * hidden + FLOAT_BYTES * choices,
    )


def route_backward_work(tokens: int, hidden: int, num_experts: int, top_k: int, item_bytes: int) -> Work:
    """Return the work of dx and dw of a router: two products and the logits' gradient.

    Operations per logit: difference, exponential, product.
    Bytes: x and the weight read, as many written; logits, experts, weights and their gradient read. The logits'
    gradient between the two is not counted.
    """
    choices = tokens * (num_experts + 3 * top_k)
    return Work(
        flops=(4 * hidden + 3) * tokens * num_experts,
        memory_bytes=2 * item_bytes * (tokens + num_experts) * hidden + FLOAT_BYTES * choices,
    )


def sort_by_expert_work(rows: int, num_experts: int) -> Work:
    """Return the work of the order of rows by experts, of int32: experts read, order and offsets written."""
    return Work(memory_bytes=FLOAT_BYTES * (2 * rows + num_experts + 1))


def take_rows_work(tokens: int, top_k: int, hidden: int, item_bytes: int) -> Work:
    """Return the work of xs[tokens * top_k, hidden] from x[tokens, hidden]: int32 order read, each row written."""
    rows = tokens * top_k
    return Work(memory_bytes=item_bytes * (tokens + rows) * hidden + FLOAT_BYTES * rows)


def take_rows_backward_work(tokens: int, top_k: int, hidden: int, item_bytes: int) -> Work:
    """Return the work of dx from dxs: as forward, and each row is added."""
    return Work(flops=tokens * top_k * hidden) + take_rows_work(tokens, top_k, hidden, item_bytes)


def combine_rows_work(tokens: int, top_k: int, hidden: int, item_bytes: int) -> Work:
    """Return the work of y[tokens, hidden], the weighted sums of top_k rows: a product and a sum per element.

    Bytes: rows read, y written; int32 order and float32 weights read.
    """
    rows = tokens * top_k
    return Work(flops=2 * rows * hidden, memory_bytes=item_bytes * (tokens + rows) * hidden + 2 * FLOAT_BYTES * rows)


def combine_rows_backward_work(tokens: int, top_k: int, hidden: int, item_bytes: int) -> Work:
    """Return the work of the rows' gradients and the weights'.

    Operations per element of the rows: the product with the weight; a product and a sum for the weight's gradient.
    Bytes: dy and rows read, as many rows written; order and weights read, the weights' gradient written.
    """
    rows = tokens * top_k
    return Work(
        flops=3 * rows * hidden, memory_bytes=item_bytes * (tokens + 2 * rows) * hidden + 3 * FLOAT_BYTES * rows
    )


def dispatch_work(rows: int, crossing: int, hidden: int, item_bytes: int, *, tail: int = 0) -> Work:
    """Return the work per rank of bringing rows[rows, hidden] to their experts' owners; also of combine's gradient.

    Args:
        rows: of this rank's experts, from all ranks.
        crossing: of this rank's own rows, those whose expert is another rank's (`crossing_rows`).
        tail: rows behind those, up to the bound of a buffer, which are zeroed; 0 where rows have their exact number.

    Bytes: each row read and written; the rows that cross are sent, each as often as the token has experts there.
    """
    return Work(memory_bytes=item_bytes * (2 * rows + tail) * hidden, link_bytes=item_bytes * crossing * hidden)


def combine_work(tokens: int, choices: int, crossing: int, hidden: int, item_bytes: int) -> Work:
    """Return the work per rank of bringing experts' rows back and adding those of each token; of dispatch's gradient.

    Args:
        tokens, choices: of this rank, and of a token.
        crossing: rows that this rank's experts made for tokens of others.

    Operations: a product and an addition for each element of each row. Bytes: a token's rows read, their sum written.
    """
    rows = tokens * choices
    return Work(
        flops=2 * rows * hidden,
        memory_bytes=item_bytes * (rows + tokens) * hidden + FLOAT_BYTES * rows,
        link_bytes=item_bytes * crossing * hidden,
    )


def expert_rows_arena_bytes(tokens: int, choices: int, hidden: int, item_bytes: int) -> int:
    """Return how large an arena must be for kernels to move rows of experts in one piece: two generations.

    Args:
        tokens, choices: of a rank, at most, and of a token.

    A generation holds a rank's tokens with the pairs of its sorted rows and their weights (dispatch, combine's
    gradient), or the results for its tokens (combine, dispatch's gradient); whatever experts they chose.
    """
    rows = tokens * choices
    there = item_bytes * tokens * hidden + (4 + FLOAT_BYTES) * rows
    # Each of the three begins at a line of its own.
    return 2 * max(there + 4 * _LINE_BYTES, item_bytes * rows * hidden)


def crossing_rows(counts: Sequence[Sequence[int]], rank: int) -> tuple[int, int]:
    """Return how many rows a rank sends to others' experts, and how many rows of others its experts get.

    Args:
        counts: rows that each rank sends each expert, [N][E]; rank j owns experts jE/N to (j+1)E/N - 1.
    """
    per_rank = len(counts[0]) // len(counts)
    own = slice(rank * per_rank, (rank + 1) * per_rank)
    kept = sum(counts[rank][own])
    return sum(counts[rank]) - kept, sum(sum(of_rank[own]) for of_rank in counts) - kept


def hottest_share(expert_counts: Sequence[int], num_ranks: int) -> float:
    """Return the rows of the rank whose experts get most, over the mean of all ranks: 1 where all get as many.

        share = max over j of (sum of counts of experts jE/N .. (j+1)E/N - 1) / (sum of all counts / N)

    All ranks wait for that rank: a layer whose products take `s` seconds where routing is even takes at
    least share * s. It is the bound of the hottest rank, which no exchange can pass.

    Args:
        expert_counts: rows of each expert, of all ranks' tokens together.
        num_ranks: N, which divides the number of experts.
    """
    per_rank = len(expert_counts) // num_ranks
    by_rank = [sum(expert_counts[first : first + per_rank]) for first in range(0, len(expert_counts), per_rank)]
    return max(by_rank) * num_ranks / sum(by_rank) if sum(by_rank) else 1.0
