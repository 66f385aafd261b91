"""Work of each operator as pure functions: floating-point operations, bytes in memory, bytes on links. No torch.

One formula feeds launch metadata, benchmarks, the training log and the planner, so they cannot disagree.
Conventions: a multiply-add is 2 operations, an exponential, a root or a division 1; bytes in memory count each operand
once (an ideal cache), also what forward keeps for backward; bytes on links are what one rank sends, ring volume. Units
are in the field names. The work is the operator's: what an implementation computes twice counts once.

Experts' operators are in work_experts.py. `Rates` turn work into seconds; fused/prediction.py adds up what a matmul
with its exchange takes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

# Statistics of rows, losses, tables of angles, masters and moments are float32; labels and rows of tables int64.
FLOAT_BYTES = 4
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
    """Return the work of C[m, n] = A[m, k] @ B[k, n]: 2*m*n*k operations; A and B are read and C is written once."""
    return Work(flops=2 * m * n * k, memory_bytes=item_bytes * (m * k + k * n + m * n))


def norm_work(rows: int, columns: int, item_bytes: int, *, residual: bool = False, centered: bool = False) -> Work:
    """Return the work of RMSNorm of x[rows, columns]; if `centered` of LayerNorm with a bias.

    If `residual`, x + residual is normalised.
    Operations per element: square, sum, two products; + 1 for the residual; + 3 for mean, difference, bias.
    Bytes: x and y, with a residual also the residual and the sum; weight, and bias; one or two float32 statistics per
    row.
    """
    tensors, vectors = 4 if residual else 2, 2 if centered else 1
    return Work(
        flops=(4 + residual + 3 * centered) * rows * columns,
        memory_bytes=item_bytes * (tensors * rows + vectors) * columns + FLOAT_BYTES * vectors * rows,
    )


def norm_backward_work(
    rows: int, columns: int, item_bytes: int, *, residual: bool = False, centered: bool = False
) -> Work:
    """Return the work of the gradients of `norm_work`'s x and weight, and of the bias if `centered`.

    If `residual`, x + residual has a gradient of its own, which is added.
    Operations per element: 9 for h = x*rstd, g = dy*w, the mean of g*h, dx and dw; + 1 for the residual; + 4 for mean,
    mean of g, db.
    Bytes: x, dy and dx, with a residual the sum's gradient; weight and its gradient, the bias's gradient; one or two
    statistics per row.
    """
    tensors, vectors = 4 if residual else 3, 3 if centered else 2
    return Work(
        flops=(9 + residual + 4 * centered) * rows * columns,
        memory_bytes=item_bytes * (tensors * rows + vectors) * columns + FLOAT_BYTES * (1 + centered) * rows,
    )


def rope_work(tokens: int, heads: int, head_size: int, item_bytes: int) -> Work:
    """Return the work of rotary embedding of x[tokens, heads, head_size], forward or backward: 6 operations per pair.

    Bytes: x and y; a float32 cosine and sine for each token and pair.
    """
    elements = tokens * heads * head_size
    return Work(flops=3 * elements, memory_bytes=2 * item_bytes * elements + FLOAT_BYTES * tokens * head_size)


def activation_work(tokens: int, features: int, item_bytes: int, *, gated: bool) -> Work:
    """Return the work of h[tokens, features] from y[tokens, features], or if `gated` from y[tokens, 2 * features].

    Operations per element of h: 4, as for y / (1 + exp(-y)); + 1 for the product with the other half.
    """
    elements = tokens * features
    return Work(flops=(4 + gated) * elements, memory_bytes=item_bytes * (2 + gated) * elements)


def activation_backward_work(tokens: int, features: int, item_bytes: int, *, gated: bool) -> Work:
    """Return the work of dy from dh and y.

    Operations per element: the activation's 4, 4 for its slope, 1 for dy; + 2 for the other half's gradient.
    """
    elements = tokens * features
    return Work(flops=(9 + 2 * gated) * elements, memory_bytes=item_bytes * (3 + 2 * gated) * elements)


def cross_entropy_work(tokens: int, vocabulary: int, item_bytes: int) -> Work:
    """Return the work of losses[tokens] from logits[tokens, vocabulary].

    Operations per logit: maximum, difference, exponential, sum.
    Bytes: logits and labels read; a float32 loss and log-sum-exp written per token.
    """
    return Work(
        flops=4 * tokens * vocabulary,
        memory_bytes=item_bytes * tokens * vocabulary + (_INDEX_BYTES + 2 * FLOAT_BYTES) * tokens,
    )


def cross_entropy_gradient_work(tokens: int, vocabulary: int, item_bytes: int) -> Work:
    """Return the work of the logits' gradient, in place or not.

    Operations per logit: difference, exponential, product.
    Bytes: logits read, as many written; labels, log-sum-exp and the losses' slopes read.
    """
    return Work(
        flops=3 * tokens * vocabulary,
        memory_bytes=2 * item_bytes * tokens * vocabulary + (_INDEX_BYTES + 2 * FLOAT_BYTES) * tokens,
    )


def linear_cross_entropy_work(tokens: int, hidden: int, vocabulary: int, item_bytes: int) -> Work:
    """Return the work of the loss of x[tokens, hidden] @ weight[vocabulary, hidden].T.

    Bytes: x, weight and labels; no logits.
    """
    memory = item_bytes * (tokens + vocabulary) * hidden + _INDEX_BYTES * tokens
    return Work(flops=(2 * hidden + 4) * tokens * vocabulary, memory_bytes=memory)


def linear_cross_entropy_backward_work(tokens: int, hidden: int, vocabulary: int, item_bytes: int) -> Work:
    """Return the work of dx and dweight: two products and the logits' gradient.

    Bytes: x and weight read, as many written; labels. An implementation does not keep the logits: it computes them
    again, or takes the gradient in its forward pass. That is not counted here.
    """
    memory = 2 * item_bytes * (tokens + vocabulary) * hidden + _INDEX_BYTES * tokens
    return Work(flops=(4 * hidden + 3) * tokens * vocabulary, memory_bytes=memory)


def embedding_work(tokens: int, hidden: int, item_bytes: int) -> Work:
    """Return the work of y[tokens, hidden], rows of a table: each is read and written, and its number read."""
    return Work(memory_bytes=(2 * item_bytes * hidden + _INDEX_BYTES) * tokens)


def embedding_backward_work(tokens: int, vocabulary: int, hidden: int, item_bytes: int) -> Work:
    """Return the work of a table's dense gradient: dy is added up; dy and the rows' numbers read, all rows written."""
    return Work(
        flops=tokens * hidden,
        memory_bytes=item_bytes * (tokens + vocabulary) * hidden + _INDEX_BYTES * tokens,
    )


def adamw_work(elements: int, grad_item_bytes: int, parameter_item_bytes: int = 0) -> Work:
    """Return the work of an AdamW step: master and two moments read and written, gradient read, parameter written.

    Masters and moments are float32.
    Operations per element: 3 and 4 for the moments, 3 for the denominator, 3 for the step, 1 for the decay.

    Args:
        parameter_item_bytes: of the copy in another dtype; 0 if there is no copy.
    """
    item_bytes = 6 * FLOAT_BYTES + grad_item_bytes + parameter_item_bytes
    return Work(flops=14 * elements, memory_bytes=item_bytes * elements)


def visible_pairs(lengths: Sequence[int], window: int | None = None) -> int:
    """Return the number of pairs of a query and a key that causal attention computes.

    Args:
        lengths: tokens of each sequence or packed document.
        window: the most keys that a query sees, including its own; None for all keys up to its own.
    """
    total = 0
    for length in lengths:
        full = length if window is None else min(window, length)
        # Query number i sees i keys, up to `full`.
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
    """Return the work of self-attention forward: q @ k.T and p @ v over `heads` query heads.

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
    """Return the work of the gradients of q, k and v: five products, so 2.5 times the forward's operations.

    Computing the scores again is one of the five, as in every published figure, because no kernel keeps them.
    Bytes: q, k, v, y, dy and a float32 log-sum-exp per query and head read; dq, dk, dv written.
    Arguments as attention_work.
    """
    forward = attention_work(batch, seq, heads, kv_heads, head_size, item_bytes, causal_half=causal_half, pairs=pairs)
    memory = item_bytes * batch * seq * head_size * (4 * heads + 4 * kv_heads) + FLOAT_BYTES * batch * seq * heads
    return Work(flops=5 * forward.flops // 2, memory_bytes=memory)


def all_gather_work(shard_bytes: int, world: int) -> Work:
    """Return the work per rank of gathering all `world` shards: in a ring a rank sends world - 1 shards."""
    sent = (world - 1) * shard_bytes
    return Work(memory_bytes=2 * world * shard_bytes if world > 1 else 0, link_bytes=sent)


def reduce_scatter_work(full_bytes: int, world: int) -> Work:
    """Return the work per rank of summing its slice: in a ring a rank sends (world - 1) / world of the tensor."""
    sent = (world - 1) * (full_bytes // world)
    return Work(memory_bytes=2 * full_bytes if world > 1 else 0, link_bytes=sent)


def all_reduce_work(full_bytes: int, world: int) -> Work:
    """Return the work per rank of a reduce-scatter followed by an all-gather."""
    return reduce_scatter_work(full_bytes, world) + all_gather_work(full_bytes // world, world)


@dataclass(frozen=True)
class Rates:
    """What a GPU attains.

    Attributes:
        flops_per_s: of a large matmul in bfloat16.
        memory_bytes_per_s: read and written in its own memory.
        link_bytes_per_s: received from, or sent to, all other ranks together by the copy engines.
        launch_seconds: what one more kernel or copy in a stream costs, from the end of one to the start of the next.
        signal_seconds: from a rank's release of a flag until another rank has seen it.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    launch_seconds: float
    signal_seconds: float


# Share of the peak: a large matmul on an H100 attains about 650 of 989 TFLOP/s at the clocks that it can hold.
_FLOPS_SHARE = 0.66
# A reduction in Triton attains 82 to 88 % of an H100's.
_MEMORY_SHARE = 0.85
# The copy engines of an H100 reach about 370 of NVLink's 450 GB/s.
_LINK_SHARE = 0.82


def _attained(flops_per_s: float, memory_bytes_per_s: float, link_bytes_per_s: float) -> Rates:
    """Return rates from published peaks. The shares are those of H100s, and are assumed for the others."""
    return Rates(
        flops_per_s=_FLOPS_SHARE * flops_per_s,
        memory_bytes_per_s=_MEMORY_SHARE * memory_bytes_per_s,
        link_bytes_per_s=_LINK_SHARE * link_bytes_per_s,
        # Orders of magnitude, the same for all: these decide between strategies for few tokens only.
        launch_seconds=3e-6,
        signal_seconds=1e-6,
    )


# Peaks: bfloat16 without sparsity, memory, links in one direction.
RATES: Mapping[str, Rates] = MappingProxyType(
    {
        # NVIDIA A100 80GB datasheet (SXM): 312 TFLOP/s, 2,039 GB/s, NVLink 3 of 600 GB/s both ways.
        "A100": _attained(312e12, 2.039e12, 300e9),
        # NVIDIA H100 datasheet (SXM): 1,979 TFLOP/s with sparsity, 3.35 TB/s, NVLink 4 of 900 GB/s both ways.
        "H100": _attained(989e12, 3.35e12, 450e9),
        # NVIDIA H200 datasheet (SXM): as the H100, with memory of 4.8 TB/s.
        "H200": _attained(989e12, 4.8e12, 450e9),
        # NVIDIA DGX B200 datasheet, an eighth of it: 36 PFLOP/s with sparsity in 8 bits, hence 2.25 in 16 without;
        # 64 TB/s; NVLink 5 of 1.8 TB/s both ways.
        "B200": _attained(2250e12, 8e12, 900e9),
        # AMD Instinct MI300X datasheet: 1,307 TFLOP/s, 5.3 TB/s; seven links to seven peers of 64 GB/s each way.
        # Fewer than 8 ranks have fewer of the links.
        "MI300X": _attained(1307e12, 5.3e12, 448e9),
    }
)


def matmul_seconds(matmul: Work, rates: Rates) -> float:
    """Return the time of a matmul: of its operations or of its bytes in memory, whichever is longer."""
    return max(matmul.flops / rates.flops_per_s, matmul.memory_bytes / rates.memory_bytes_per_s)


def link_seconds(exchange: Work, rates: Rates) -> float:
    """Return the time of an exchange's bytes on links."""
    return exchange.link_bytes / rates.link_bytes_per_s


def rates_of(device_name: str) -> Rates | None:
    """Return the rates of a GPU, found by the name that its driver gives.

    Args:
        device_name: as torch.cuda.get_device_name: "NVIDIA H100 80GB HBM3".

    Returns:
        Those of the model in RATES that the name contains as a word. None if it contains no such word. None also for
        cards on PCIe or with a bridge to one other card, whose links are not those of the table.
    """
    words = re.findall(r"[A-Za-z0-9]+", device_name.upper())
    if "PCIE" in words or "NVL" in words:
        return None
    return next((rates for model, rates in RATES.items() if model in words), None)
