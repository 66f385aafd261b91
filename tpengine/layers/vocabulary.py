"""The two layers that are cut over the vocabulary: the token embedding, and cross-entropy over the logits.

The rows of the table are cut over tp, and so are the columns of the logits: no rank ever holds a whole row of logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.derivatives import differentiable_once, refuse_second_order
from tpkernels.exchange.communicator import Communicator
from tpkernels.ops.cross_entropy.operator import (
    check_logits,
    check_writable,
    combine_partials,
    gradient_of_,
    must_keep,
    partials_of,
    token_losses,
)
from tpkernels.ops.embedding import check_rows_and_table, embedding_forward

from tpengine.config import IGNORED_LABEL
from tpengine.layers.gradient_sink import GradientSink, check_reaches
from tpengine.layers.placement import Placement, check_tokens, cut


class Smoothing(NamedTuple):
    """What is added to a token's cross-entropy.

    Attributes:
        label_smoothing: eps, the share of the label's weight that is spread over the vocabulary.
        z_loss: weight of lse^2, which keeps the logits near 0.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Local shapes: z[n, T, C], n shards of C = V/(n tp) columns; labels[T]; w[T]; loss[] equal on all ranks.

    forward:  m, s, t, u = max z, sum exp(z - m), z[label], sum z   over the columns of each shard: 4*n*T numbers
              one gather brings [m, s, t, u] of all shards;  M = max m;  lse = log(sum s exp(m - M)) + M
              loss = sum over valid t of w * ((1 - eps) * (lse - sum t) + eps * (lse - sum u / V) + z_loss * lse^2)
    dgrad:    dz = (softmax(z) * (1 + 2 z_loss lse) - (1 - eps) * onehot(label) - eps / V) * w * dloss, zero where the
              label is ignored; overwrites z

    Each shard is computed separately, in shapes that depend only on its own size.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        vocab_size: int,
        comm: Communicator,
        smoothing: Smoothing,
        keeps_logits: bool,
    ) -> Tensor:
        ctx.columns = columns_of(logits, vocab_size, comm)
        partials = [partials_of(z, labels, first, valid) for z, (first, valid) in zip(logits, ctx.columns, strict=True)]
        combined = combine_partials(comm.all_gather(torch.stack(partials)))
        ctx.save_for_backward(logits, labels, weights, *combined)
        ctx.keeps_logits, ctx.smoothing = keeps_logits, smoothing
        ctx.vocab_size = vocab_size
        losses = token_losses(combined, labels, vocab_size, **smoothing._asdict())
        return (losses if weights is None else losses * weights).sum()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        # A second backward through the same graph fails: autograd notices that the logits were overwritten.
        logits, labels, weights, max_logit, exp_sum, *_ = ctx.saved_tensors
        logits = logits.clone() if ctx.keeps_logits else logits
        check_writable(logits)
        slopes = dloss.expand(labels.shape) if weights is None else dloss * weights.to(dloss.dtype)
        for z, (first, valid) in zip(logits, ctx.columns, strict=True):
            gradient_of_(z, labels, max_logit, exp_sum, slopes, ctx.vocab_size, first, valid, *ctx.smoothing)
        return logits, None, None, None, None, None, None


def columns_of(logits: Tensor, vocab_size: int, comm: Communicator) -> list[tuple[int, int]]:
    """Return the first column of each of this rank's shards z[n, T, C], and how many of its C are no padding."""
    num_shards, _, num_columns = logits.shape
    firsts = [(comm.rank * num_shards + i) * num_columns for i in range(num_shards)]
    return [(first, min(max(vocab_size - first, 0), num_columns)) for first in firsts]


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    comm: Communicator,
    *,
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    keeps_logits: bool = False,
) -> Tensor:
    """Sum the cross-entropy over the valid labels.

        lse[t] = logsumexp(z[t, :V]);  nll[t] = (1 - eps) * (lse - z[t, labels[t]]) + eps * (lse - mean(z[t, :V]))
        loss = sum over t with labels[t] != -100 of w[t] * (nll[t] + z_loss * lse[t]^2)

    Args:
        logits: z[T, V/tp], this rank's columns of the padded vocabulary; or z[n, T, V/(n tp)], the same columns in n
            shards, each summed separately. Backward overwrites the logits with their gradient, unless they are a leaf
            or the call is compiled.
        labels: [T] int64, equal on every tp rank, 0 <= label < vocab_size or -100 (ignored).
        vocab_size: V; columns at or beyond it are padding and take no part.
        comm: the tp ranks.
        weights: w[T], equal on every tp rank; default ones.
        label_smoothing: eps, from 0 to 1.
        z_loss: at least 0.
        keeps_logits: whether somebody else reads the logits in his backward: then the gradient is a tensor of its own.

    Returns:
        Scalar in promote_types(dtype, float32), equal on every rank. It is a sum, not a mean: only the caller knows
        the number of valid targets of the global step, and divides by it.

    Raises:
        ValueError: shapes, dtypes or numbers that do not fit; on a CPU, a label outside the vocabulary (on a GPU the
            check would wait for the device).

    Cost: one gather of 4*n*T numbers; keeps the logits for backward, and nothing else of their size.
    Numerics: in promote_types(dtype, float32); torch.sum adds the shards. Source: Shoeybi et al., "Megatron-LM"
    (arXiv 1909.08053), section 3; they all-reduce three times where we gather once. Label smoothing: arXiv 1512.00567;
    z-loss: arXiv 2204.02311.
    """
    smoothing = Smoothing(label_smoothing, z_loss)
    shards = checked_shards(logits, labels, vocab_size)
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(
            f"every label needs its weight: weights {tuple(weights.shape)}, labels {tuple(labels.shape)}: flatten both"
        )
    keeps = keeps_logits or must_keep(logits)
    loss: Tensor = _VocabParallelCrossEntropy.apply(shards, labels, weights, vocab_size, comm, smoothing, keeps)
    return loss


def checked_shards(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """Return logits as shards [n, T, C].

    Raises:
        ValueError: logits and labels do not fit; on a CPU, a label outside the vocabulary.
    """
    check_range("labels", labels.masked_fill(labels == IGNORED_LABEL, 0), vocab_size)
    shards = logits if logits.dim() == 3 else logits[None]
    for shard in shards:
        check_logits(shard, labels, 0, shard.shape[1])
    return shards


def check_range(what: str, indices: Tensor, size: int) -> None:
    """Raise ValueError for an index outside [0, size); CPU tensors only, since on a GPU the check would synchronise."""
    if indices.device.type != "cpu" or not len(indices):
        return
    low, high = (int(bound) for bound in indices.aminmax())
    if low < 0 or high >= size:
        raise ValueError(
            f"{what} must lie in the vocabulary: got {low} to {high}, vocabulary {size}: use 0 to {size - 1}"
        )


class _VocabParallelEmbedding(torch.autograd.Function):
    """Local shapes: tokens[T] (all of them on every rank), w[V/tp, D], y[T/tp, D].

    forward:  y = reduce_scatter(w's row for each token of this rank's range, zeros for other tokens)
    wgrad:    dw[token] += all_gather(dy)[t] for the tokens of this rank's range, into the sink
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, comm: Communicator, sink: GradientSink) -> Tensor:
        rows = tokens - comm.rank * weight.shape[0]
        ctx.save_for_backward(rows)
        ctx.comm, ctx.sink, ctx.parameter = comm, sink, weight
        partial = embedding_forward(rows, weight)
        return partial if comm.size == 1 else comm.reduce_scatter(partial)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("a vocabulary-parallel embedding")
        (rows,) = ctx.saved_tensors
        full = ctx.comm.all_gather(dy)
        dw = ctx.sink.add_rows(ctx.parameter, rows, full) if ctx.needs_input_grad[1] else None
        return None, dw, None, None


class VocabParallelEmbedding(nn.Module):
    """Look tokens up in a table whose rows are cut over tp.

        y[T/tp, D] = reduce_scatter_tp(w[V/tp, D][tokens[T]])

    Args:
        num_embeddings, embedding_dim: V (a multiple of tp) and D, global.
        comm: the tp ranks.
        sink: where the weight gradient goes; default `weight.grad`.
        dtype, device: of the weight, as torch.

    Shape: tokens [T] int64, equal on every tp rank, 0 <= token < V; y [T/tp, D].

    Raises:
        ValueError: V or T is not divisible by tp; on a CPU, a token outside the table. On a GPU that check would wait
            for the device: there such a token gives a row of zeros.

    Cost: (tp-1)/tp*T*D elements sent.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        comm: Communicator,
        *,
        sink: GradientSink | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if num_embeddings % comm.size:
            up = -(-num_embeddings // comm.size) * comm.size
            raise ValueError(
                f"the vocabulary must be divisible by tp: {num_embeddings} rows, tp {comm.size}: pad to {up}"
            )
        self.comm = comm
        self.sink: GradientSink = sink or GradientSink()
        self.weight = Parameter(torch.empty(num_embeddings // comm.size, embedding_dim, dtype=dtype, device=device))
        nn.init.normal_(self.weight, std=0.02)

    def tp_placements(self) -> Mapping[str, Placement]:
        """See SaysPlacements: rows are cut."""
        return {"weight": cut(self.comm, 0)}

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens[T] -> y[T/tp, D]."""
        weight = self.weight
        check_rows_and_table(tokens, weight, "weight")
        check_tokens(len(tokens), self.comm.num_row_parts)
        check_range("tokens", tokens, weight.shape[0] * self.comm.size)
        check_reaches(self.sink, weight, "an embedding's table")
        y: Tensor = _VocabParallelEmbedding.apply(tokens, weight, self.comm, self.sink)
        return y
