"""Work of each operator as pure functions: floating-point operations, bytes in memory, bytes on links. No torch.

One formula feeds launch metadata, benchmarks, the training log and the planner, so they cannot disagree.
Conventions: a multiply-add is 2 operations, an exponential, a root or a division 1; bytes in memory count each operand
once (an ideal cache), also what forward keeps for backward; bytes on links are what one rank sends, ring volume. Units
are in the field names. The work is the operator's: what an implementation computes twice counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Statistics of rows, losses, tables of angles, masters and moments are float32; labels and rows of tables int64.
_FLOAT_BYTES = 4
_INDEX_BYTES = 8


@dataclass(frozen=True)
class Work:
    """What one call costs on one rank.

    Attributes:
        flops: floating-point operations.
        memory_bytes: bytes read and written in the rank's own memory, each operand once.
        link_bytes: bytes this rank sends to others.
    """

    flops: int = 0
    memory_bytes: int = 0
    link_bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.memory_bytes + other.memory_bytes,
            self.link_bytes + other.link_bytes,
        )


def matmul_work(m: int, n: int, k: int, item_bytes: int) -> Work:
    """C[m, n] = A[m, k] @ B[k, n]: 2*m*n*k operations; A and B read, C written once."""
    return Work(flops=2 * m * n * k, memory_bytes=item_bytes * (m * k + k * n + m * n))


def norm_work(rows: int, columns: int, item_bytes: int, *, residual: bool = False, centered: bool = False) -> Work:
    """RMSNorm of x[rows, columns]; LayerNorm with a bias if `centered`; of x + residual if `residual`.

    Operations an element: square, sum, two products; + 1 for the residual; + 3 for mean, difference, bias.
    Bytes: x and y, with a residual that and the sum; weight, and bias; a float32 statistic or two a row.
    """
    tensors, vectors = 4 if residual else 2, 2 if centered else 1
    return Work(
        flops=(4 + residual + 3 * centered) * rows * columns,
        memory_bytes=item_bytes * (tensors * rows + vectors) * columns + _FLOAT_BYTES * vectors * rows,
    )


def norm_backward_work(
    rows: int, columns: int, item_bytes: int, *, residual: bool = False, centered: bool = False
) -> Work:
    """Gradients of `norm_work`'s x and weight, and bias if `centered`; `residual`: the sum has a gradient of its own.

    Operations an element: 9 for h = x*rstd, g = dy*w, the mean of g*h, dx and dw; + 1; + 4 for mean, mean of g, db.
    Bytes: x, dy and dx, with a residual the sum's gradient; weight and its gradient, bias's; a statistic or two a row.
    """
    tensors, vectors = 4 if residual else 3, 3 if centered else 2
    return Work(
        flops=(9 + residual + 4 * centered) * rows * columns,
        memory_bytes=item_bytes * (tensors * rows + vectors) * columns + _FLOAT_BYTES * (1 + centered) * rows,
    )


def rope_work(tokens: int, heads: int, head_size: int, item_bytes: int) -> Work:
    """Rotary embedding of x[tokens, heads, head_size], forward or backward: 6 operations a pair.

    Bytes: x and y; a float32 cosine and sine for each token and pair.
    """
    elements = tokens * heads * head_size
    return Work(flops=3 * elements, memory_bytes=2 * item_bytes * elements + _FLOAT_BYTES * tokens * head_size)


def activation_work(tokens: int, features: int, item_bytes: int, *, gated: bool) -> Work:
    """h[tokens, features] of y[tokens, features], or if `gated` of y[tokens, 2 * features].

    Operations an element of h: 4, as of y / (1 + exp(-y)); + 1 for the product with the other half.
    """
    elements = tokens * features
    return Work(flops=(4 + gated) * elements, memory_bytes=item_bytes * (2 + gated) * elements)


def activation_backward_work(tokens: int, features: int, item_bytes: int, *, gated: bool) -> Work:
    """dy of dh and y. Operations: the activation's 4, 4 for its slope, 1 for dy; + 2 for the other half's gradient."""
    elements = tokens * features
    return Work(flops=(9 + 2 * gated) * elements, memory_bytes=item_bytes * (3 + 2 * gated) * elements)


def cross_entropy_work(tokens: int, vocabulary: int, item_bytes: int) -> Work:
    """losses[tokens] of logits[tokens, vocabulary]: maximum, difference, exponential, sum.

    Bytes: logits and labels read; a float32 loss and log-sum-exp a token written.
    """
    return Work(
        flops=4 * tokens * vocabulary,
        memory_bytes=item_bytes * tokens * vocabulary + (_INDEX_BYTES + 2 * _FLOAT_BYTES) * tokens,
    )


def cross_entropy_gradient_work(tokens: int, vocabulary: int, item_bytes: int) -> Work:
    """The logits' gradient, in their place or beside them: difference, exponential, product.

    Bytes: logits read, as many written; labels, log-sum-exp and the losses' slopes read.
    """
    return Work(
        flops=3 * tokens * vocabulary,
        memory_bytes=2 * item_bytes * tokens * vocabulary + (_INDEX_BYTES + 2 * _FLOAT_BYTES) * tokens,
    )


def linear_cross_entropy_work(tokens: int, hidden: int, vocabulary: int, item_bytes: int) -> Work:
    """The loss of x[tokens, hidden] @ weight[vocabulary, hidden].T. Bytes: x, weight and labels; no logits."""
    memory = item_bytes * (tokens + vocabulary) * hidden + _INDEX_BYTES * tokens
    return Work(flops=(2 * hidden + 4) * tokens * vocabulary, memory_bytes=memory)


def linear_cross_entropy_backward_work(tokens: int, hidden: int, vocabulary: int, item_bytes: int) -> Work:
    """dx and dweight: two products and the logits' gradient. Bytes: x and weight read, as many written; labels.

    The logits that are not kept are an implementation's to compute again, or its forward pass's to use; no work here.
    """
    memory = 2 * item_bytes * (tokens + vocabulary) * hidden + _INDEX_BYTES * tokens
    return Work(flops=(4 * hidden + 3) * tokens * vocabulary, memory_bytes=memory)


def embedding_work(tokens: int, hidden: int, item_bytes: int) -> Work:
    """y[tokens, hidden], rows of a table: each read and written, and its number read."""
    return Work(memory_bytes=(2 * item_bytes * hidden + _INDEX_BYTES) * tokens)


def embedding_backward_work(tokens: int, vocabulary: int, hidden: int, item_bytes: int) -> Work:
    """The table's dense gradient: dy is added up; dy and the rows' numbers are read, all rows written."""
    return Work(
        flops=tokens * hidden,
        memory_bytes=item_bytes * (tokens + vocabulary) * hidden + _INDEX_BYTES * tokens,
    )


def adamw_work(elements: int, grad_item_bytes: int, parameter_item_bytes: int = 0) -> Work:
    """One AdamW step: float32 master and two moments read and written, the gradient read, a parameter written.

    Operations an element: 3 and 4 for the moments, 3 for the denominator, 3 for the step, 1 for the decay.

    Args:
        parameter_item_bytes: of the copy in another dtype; 0 where there is none.
    """
    item_bytes = 6 * _FLOAT_BYTES + grad_item_bytes + parameter_item_bytes
    return Work(flops=14 * elements, memory_bytes=item_bytes * elements)


def visible_pairs(lengths: Sequence[int], window: int | None = None) -> int:
    """Pairs of a query and a key that causal attention computes.

    Args:
        lengths: tokens of each sequence or packed document.
        window: keys that a query sees at most, its own among them; None for all before it.
    """
    total = 0
    for length in lengths:
        full = length if window is None else min(window, length)
        # Queries 1 to `full` see as many keys as their number says, the others `full`.
        total += full * (full + 1) // 2 + (length - full) * full
    return total


def attention_work(
    batch: int,
    seq: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    item_bytes: int,
    *,
    causal_half: bool,
    pairs: int | None = None,
) -> Work:
    """Self-attention forward: q @ k.T and p @ v over `heads` query heads.

    Args:
        causal_half: count only the half of the scores at or below the diagonal (the work a causal kernel does);
            False counts the full square, the convention of the PaLM paper's MFU (appendix B).
        pairs: count these pairs of a query and a key instead, over the batch (windows, documents: visible_pairs).
    """
    counted = batch * seq * seq if pairs is None else pairs
    full = 4 * heads * counted * head_size
    memory = item_bytes * batch * seq * head_size * (2 * heads + 2 * kv_heads)
    return Work(flops=full // 2 if causal_half and pairs is None else full, memory_bytes=memory)


def attention_backward_work(
    batch: int,
    seq: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    item_bytes: int,
    *,
    causal_half: bool,
    pairs: int | None = None,
) -> Work:
    """Gradients of q, k and v: five products where forward has two, hence 2.5 times its operations.

    The scores are among the five, the convention of every published figure since no kernel keeps them.
    Bytes: q, k, v, y, dy and a float32 log-sum-exp a query and head read; dq, dk, dv written.
    Arguments as attention_work.
    """
    forward = attention_work(batch, seq, heads, kv_heads, head_size, item_bytes, causal_half=causal_half, pairs=pairs)
    memory = item_bytes * batch * seq * head_size * (4 * heads + 4 * kv_heads) + _FLOAT_BYTES * batch * seq * heads
    return Work(flops=5 * forward.flops // 2, memory_bytes=memory)


def all_gather_work(shard_bytes: int, world: int) -> Work:
    """Each rank ends with all `world` shards: a ring sends (world - 1) shards a rank."""
    sent = (world - 1) * shard_bytes
    return Work(memory_bytes=2 * world * shard_bytes if world > 1 else 0, link_bytes=sent)


def reduce_scatter_work(full_bytes: int, world: int) -> Work:
    """Each rank ends with the sum of its slice: a ring sends (world - 1) / world of the tensor a rank."""
    sent = (world - 1) * (full_bytes // world)
    return Work(memory_bytes=2 * full_bytes if world > 1 else 0, link_bytes=sent)


def all_reduce_work(full_bytes: int, world: int) -> Work:
    """A reduce-scatter followed by an all-gather."""
    return reduce_scatter_work(full_bytes, world) + all_gather_work(full_bytes // world, world)
