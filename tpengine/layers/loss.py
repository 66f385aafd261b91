"""Cross-entropy over logits whose vocabulary is cut over tp; the whole row of logits is nowhere gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpengine.collectives import Communicator
from tpengine.config import IGNORED_LABEL
from tpengine.gradients import accumulation_dtype


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Local shapes: z[T, V/tp], labels[T], loss[] equal on all ranks.

    forward:  m_r, s_r, t_r = max z, sum exp(z - m_r), z[label]   over this rank's columns
              [m, s, t] of all ranks by one gather of 3*T numbers;  M = max_r m_r
              loss = sum over valid t of log(sum_r s_r exp(m_r - M)) + M - sum_r t_r
    dgrad:    dz = (softmax(z) - onehot(label)) * dloss, zero where the label is ignored
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, comm: Communicator) -> Tensor:
        first = comm.rank * logits.shape[1]
        num_valid = min(max(vocab_size - first, 0), logits.shape[1])
        z = logits[:, :num_valid].to(accumulation_dtype(logits.dtype))
        valid = labels != IGNORED_LABEL
        column = labels - first
        mine = valid & (column >= 0) & (column < num_valid)

        partials = z.new_zeros(3, len(labels))
        if num_valid:
            partials[0] = z.amax(1)
            exponentials = (z - partials[0][:, None]).exp_()
            partials[1] = exponentials.sum(1)
            target = z.gather(1, column.clamp(0, num_valid - 1)[:, None])[:, 0]
            partials[2] = target.masked_fill(~mine, 0)
        else:  # this rank's columns are all padding
            partials[0] = -torch.inf
            exponentials = z
        ranks = comm.all_gather(partials).view(comm.size, 3, -1)
        top = ranks[:, 0].amax(0)
        total = (ranks[:, 1] * (ranks[:, 0] - top).exp()).sum(0)
        losses = total.log() + top - ranks[:, 2].sum(0)

        # softmax of this rank's columns = exponentials * scale
        ctx.save_for_backward(exponentials, (partials[0] - top).exp() / total, column, mine, valid)
        ctx.logits = logits.dtype, logits.shape[1]
        return losses.masked_fill(~valid, 0).sum()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        exponentials, scale, column, mine, valid = ctx.saved_tensors
        dtype, num_columns = ctx.logits
        weight = valid * dloss
        dz = exponentials.new_zeros(len(column), num_columns)
        num_valid = exponentials.shape[1]
        torch.mul(exponentials, (scale * weight)[:, None], out=dz[:, :num_valid])
        rows = mine.nonzero()[:, 0]
        dz[rows, column[rows]] -= dloss
        return dz.to(dtype), None, None, None


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int, comm: Communicator) -> Tensor:
    """Sum the cross-entropy over the valid labels.

        loss = sum over t with labels[t] != -100 of -log softmax(z[t, :vocab_size])[labels[t]]

    Args:
        logits: z[T, V/tp], this rank's columns of the padded vocabulary.
        labels: [T] int64, equal on every tp rank, 0 <= label < vocab_size or -100 (ignored).
        vocab_size: columns at or beyond it are padding and take no part.
        comm: the tp ranks.

    Returns:
        Scalar in promote_types(dtype, float32), equal on every rank. A sum, not a mean: dividing by the number of
        valid targets of the global step is the caller's, who alone knows it.

    Raises:
        ValueError: on a CPU, a label outside the vocabulary (on a GPU the check would wait for the device).

    Cost: one gather of 3*T numbers; keeps T*V/tp exponentials for backward.
    Numerics: in promote_types(dtype, float32); ranks are added in rank order. Source: Shoeybi et al., "Megatron-LM"
    (arXiv 1909.08053), section 3, who all-reduce three times.
    """
    check_range("labels", labels.masked_fill(labels == IGNORED_LABEL, 0), vocab_size)
    loss: Tensor = _VocabParallelCrossEntropy.apply(logits, labels, vocab_size, comm)
    return loss


def check_range(what: str, indices: Tensor, size: int) -> None:
    """Raise ValueError for an index outside [0, size); on CPU tensors only, where looking costs no synchronisation."""
    if indices.device.type != "cpu" or not len(indices):
        return
    low, high = (int(bound) for bound in indices.aminmax())
    if low < 0 or high >= size:
        raise ValueError(
            f"{what} must lie in the vocabulary: got {low} to {high}, vocabulary {size}: use 0 to {size - 1}"
        )
