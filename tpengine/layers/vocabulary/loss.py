"""Cross-entropy over logits whose vocabulary is cut over tp. No rank ever holds a whole row of logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from tpkernels.derivatives import differentiable_once
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

from tpengine.config import IGNORED_LABEL


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Local shapes: z[n, T, C], n shards of C = V/(n tp) columns; labels[T]; loss[] equal on all ranks.

    forward:  m, s, t, u = max z, sum exp(z - m), z[label], sum z   over the columns of each shard: 4*n*T numbers
              one gather brings [m, s, t, u] of all shards;  M = max m
              loss = sum over valid t of log(sum s exp(m - M)) + M - sum t
    dgrad:    dz = (softmax(z) - onehot(label)) * dloss, zero where the label is ignored; overwrites z

    Each shard is computed separately, in shapes that depend only on its own size.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, comm: Communicator, keeps_logits: bool
    ) -> Tensor:
        num_shards, _, num_columns = logits.shape
        firsts = [(comm.rank * num_shards + i) * num_columns for i in range(num_shards)]
        ctx.columns = [(first, min(max(vocab_size - first, 0), num_columns)) for first in firsts]
        partials = [partials_of(z, labels, first, valid) for z, (first, valid) in zip(logits, ctx.columns, strict=True)]
        combined = combine_partials(comm.all_gather(torch.stack(partials)))
        ctx.save_for_backward(logits, labels, *combined)
        ctx.keeps_logits = keeps_logits
        ctx.vocab_size = vocab_size
        return token_losses(combined, labels, vocab_size).sum()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        # A second backward through the same graph fails: autograd notices that the logits were overwritten.
        logits, labels, max_logit, exp_sum, *_ = ctx.saved_tensors
        logits = logits.clone() if ctx.keeps_logits else logits
        check_writable(logits)
        slopes = dloss.expand(labels.shape)
        for z, (first, valid) in zip(logits, ctx.columns, strict=True):
            gradient_of_(z, labels, max_logit, exp_sum, slopes, ctx.vocab_size, first, valid)
        return logits, None, None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int, comm: Communicator) -> Tensor:
    """Sum the cross-entropy over the valid labels.

        loss = sum over t with labels[t] != -100 of -log softmax(z[t, :vocab_size])[labels[t]]

    Args:
        logits: z[T, V/tp], this rank's columns of the padded vocabulary; or z[n, T, V/(n tp)], the same columns in n
            shards, each summed separately. Backward overwrites the logits with their gradient, unless they are a leaf
            or the call is compiled.
        labels: [T] int64, equal on every tp rank, 0 <= label < vocab_size or -100 (ignored).
        vocab_size: columns at or beyond it are padding and take no part.
        comm: the tp ranks.

    Returns:
        Scalar in promote_types(dtype, float32), equal on every rank. It is a sum, not a mean: only the caller knows
        the number of valid targets of the global step, and divides by it.

    Raises:
        ValueError: shapes or dtypes that do not fit; on a CPU, a label outside the vocabulary (on a GPU the check would
            wait for the device).

    Cost: one gather of 4*n*T numbers; keeps the logits for backward, and nothing else of their size.
    Numerics: in promote_types(dtype, float32); torch.sum adds the shards. Source: Shoeybi et al., "Megatron-LM"
    (arXiv 1909.08053), section 3; they all-reduce three times where we gather once.
    """
    check_range("labels", labels.masked_fill(labels == IGNORED_LABEL, 0), vocab_size)
    shards = logits if logits.dim() == 3 else logits[None]
    for shard in shards:
        check_logits(shard, labels, 0, shard.shape[1])
    loss: Tensor = _VocabParallelCrossEntropy.apply(shards, labels, vocab_size, comm, must_keep(logits))
    return loss


def check_range(what: str, indices: Tensor, size: int) -> None:
    """Raise ValueError for an index outside [0, size); CPU tensors only, since on a GPU the check would synchronise."""
    if indices.device.type != "cpu" or not len(indices):
        return
    low, high = (int(bound) for bound in indices.aminmax())
    if low < 0 or high >= size:
        raise ValueError(
            f"{what} must lie in the vocabulary: got {low} to {high}, vocabulary {size}: use 0 to {size - 1}"
        )
