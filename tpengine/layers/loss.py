"""Cross-entropy over logits whose vocabulary is cut over tp; the whole row of logits is nowhere gathered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpengine.collectives import Communicator
from tpengine.config import IGNORED_LABEL
from tpengine.gradients import accumulation_dtype


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Local shapes: z[n, T, C], n shards of C = V/(n tp) columns; labels[T]; loss[] equal on all ranks.

    forward:  m_r, s_r, t_r = max z, sum exp(z - m_r), z[label]   over the columns of shard r
              [m, s, t] of all shards by one gather of 3*n*T numbers;  M = max_r m_r
              loss = sum over valid t of log(sum_r s_r exp(m_r - M)) + M - sum_r t_r
    dgrad:    dz = (softmax(z) - onehot(label)) * dloss, zero where the label is ignored

    Each shard is computed by itself, in shapes that depend on its size alone.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, comm: Communicator) -> Tensor:
        num_shards, num_tokens, num_columns = logits.shape
        valid = labels != IGNORED_LABEL
        partials = logits.new_zeros(num_shards, 3, num_tokens, dtype=accumulation_dtype(logits.dtype))
        firsts = [(comm.rank * num_shards + i) * num_columns for i in range(num_shards)]
        shards = [_Shard.of(z, labels, valid, vocab_size, first) for z, first in zip(logits, firsts, strict=True)]
        exponentials = [shard.reduce_into(out) for shard, out in zip(shards, partials, strict=True)]
        ranks = comm.all_gather(partials)
        top = ranks[:, 0].amax(0)
        total = (ranks[:, 1] * (ranks[:, 0] - top).exp()).sum(0)
        losses = total.log() + top - ranks[:, 2].sum(0)

        # softmax of a shard's columns = exponentials * scale
        scales = [(own[0] - top).exp() / total for own in partials]
        columns, mine = zip(*((shard.column, shard.mine) for shard in shards), strict=True)
        ctx.save_for_backward(valid, *exponentials, *scales, *columns, *mine)
        ctx.logits = logits.dtype, logits.shape
        return losses.masked_fill(~valid, 0).sum()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dtype, shape = ctx.logits
        valid, *saved = ctx.saved_tensors
        weight = valid * dloss
        dlogits = torch.empty(shape, dtype=dtype, device=valid.device)
        num_shards = shape[0]
        for i, dz in enumerate(dlogits):
            exponentials, scale, column, mine = saved[i::num_shards]
            num_valid = exponentials.shape[1]
            dz[:, num_valid:] = 0
            is_wide = dtype == exponentials.dtype
            of_valid = torch.mul(exponentials, (scale * weight)[:, None], out=dz[:, :num_valid] if is_wide else None)
            rows = mine.nonzero()[:, 0]
            of_valid[rows, column[rows]] -= dloss
            if not is_wide:
                dz[:, :num_valid] = of_valid
        return dlogits, None, None, None


@dataclass(frozen=True)
class _Shard:
    """Some columns of the logits.

    Attributes:
        z: [T, columns], without padding, in the accumulation dtype.
        column: [T], the label's column counted from the first of these.
        mine: [T], whether it is one of these.
    """

    z: Tensor
    column: Tensor
    mine: Tensor

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, valid: Tensor, vocab_size: int, first: int) -> _Shard:
        num_valid = min(max(vocab_size - first, 0), logits.shape[1])
        column = labels - first
        mine = valid & (column >= 0) & (column < num_valid)
        return cls(logits[:, :num_valid].to(accumulation_dtype(logits.dtype)), column, mine)

    def reduce_into(self, out: Tensor) -> Tensor:
        """Write (m, s, t) into out[3, T]; return exp(z - m)."""
        if not self.z.shape[1]:  # these columns are all padding
            out[0] = -torch.inf
            return self.z
        out[0] = self.z.amax(1)
        exponentials = (self.z - out[0][:, None]).exp_()
        out[1] = exponentials.sum(1)
        target = self.z.gather(1, self.column.clamp(0, self.z.shape[1] - 1)[:, None])[:, 0]
        out[2] = target.masked_fill(~self.mine, 0)
        return exponentials


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, vocab_size: int, comm: Communicator) -> Tensor:
    """Sum the cross-entropy over the valid labels.

        loss = sum over t with labels[t] != -100 of -log softmax(z[t, :vocab_size])[labels[t]]

    Args:
        logits: z[T, V/tp], this rank's columns of the padded vocabulary; or z[n, T, V/(n tp)], them in n shards, each
            of which is summed by itself.
        labels: [T] int64, equal on every tp rank, 0 <= label < vocab_size or -100 (ignored).
        vocab_size: columns at or beyond it are padding and take no part.
        comm: the tp ranks.

    Returns:
        Scalar in promote_types(dtype, float32), equal on every rank. A sum, not a mean: dividing by the number of
        valid targets of the global step is the caller's, who alone knows it.

    Raises:
        ValueError: on a CPU, a label outside the vocabulary (on a GPU the check would wait for the device).

    Cost: one gather of 3*n*T numbers; keeps T*V/tp exponentials for backward.
    Numerics: in promote_types(dtype, float32); shards are added as torch.sum does over them. Source: Shoeybi et al.,
    "Megatron-LM" (arXiv 1909.08053), section 3, who all-reduce three times.
    """
    check_range("labels", labels.masked_fill(labels == IGNORED_LABEL, 0), vocab_size)
    shards = logits if logits.dim() == 3 else logits[None]
    loss: Tensor = _VocabParallelCrossEntropy.apply(shards, labels, vocab_size, comm)
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
