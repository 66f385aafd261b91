"""What a loss may ask of the model's end, differentiable: values of tokens, and tensors that tp ranks hold parts of.

Every function here returns the same on all tp ranks, and every rank goes on with it in the same way, up to one loss.
So each rank's gradient of it is already that of the loss: a rank takes what belongs to its own columns or rows, and
nothing is summed over ranks. (`gather` of collectives.py is for the other case: ranks that go on differently, whose
gradients add up.)

Log-probabilities and entropy gather a few numbers of each token, never logits. They leave the logits as they are, so
that a loss may use several of them: each backward makes a gradient of the logits' size. Cross-entropy alone, which
overwrites the logits, is in vocabulary.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from tpkernels.derivatives import differentiable_once
from tpkernels.exchange.communicator import Communicator
from tpkernels.launch import accumulation_dtype
from tpkernels.ops.cross_entropy.operator import combine_partials, gradient_of_, partials_of, token_losses

from tpengine.layers.vocabulary import checked_shards, columns_of

# Rows are widened so many elements at a time: 16 MB of float32.
_BLOCK_ELEMENTS = 1 << 22


class _TokenLogprobs(torch.autograd.Function):
    """Local shapes: z[n, T, C]; labels[T]; p[T] equal on all ranks.

    forward:  as cross-entropy's (vocabulary.py), one gather of 4*n*T numbers;  p = sum t - M - log(sum s exp(m - M))
    dgrad:    dz = (onehot(label) - softmax(z)) * dp, zero where the label is ignored; of this rank's columns
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, comm: Communicator) -> Tensor:
        ctx.columns, ctx.vocab_size = columns_of(logits, vocab_size, comm), vocab_size
        partials = [partials_of(z, labels, first, valid) for z, (first, valid) in zip(logits, ctx.columns, strict=True)]
        combined = combine_partials(comm.all_gather(torch.stack(partials)))
        ctx.save_for_backward(logits, labels, combined.max_logit, combined.exp_sum)
        return 0 - token_losses(combined, labels, vocab_size)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dp: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, max_logit, exp_sum = ctx.saved_tensors
        dz = logits.clone(memory_format=torch.contiguous_format)
        for of_shard, (first, valid) in zip(dz, ctx.columns, strict=True):
            gradient_of_(of_shard, labels, max_logit, exp_sum, -dp, ctx.vocab_size, first, valid)
        return dz, None, None, None


class _Entropy(torch.autograd.Function):
    """Local shapes: z[n, T, C]; h[T] equal on all ranks.

    forward:  m, s, w = max z, sum exp(z - m), sum exp(z - m) (z - m)   over the columns of each shard
              one gather brings them of all shards;  M = max m;  f = exp(m - M)
              S = sum s f;  W = sum (w + (m - M) s) f;  h = log S - W / S
    dgrad:    q = softmax(z);  dz = -q * (log q + h) * dh   of this rank's columns

    Terms of probability 0 are 0, also of a logit of -inf.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, vocab_size: int, comm: Communicator) -> Tensor:
        ctx.columns = columns_of(logits, vocab_size, comm)
        dtype = accumulation_dtype(logits.dtype)
        partials = logits.new_zeros(len(logits), 3, logits.shape[1], dtype=dtype)
        partials[:, 0] = -torch.inf
        for of_shard, z, (_, valid) in zip(partials, logits, ctx.columns, strict=True):
            for rows in _blocks(z, valid):
                block = z[rows, :valid].to(dtype)
                top = block.amax(1)
                centred = block - top[:, None]
                powers = centred.exp()
                of_shard[0, rows], of_shard[1, rows] = top, powers.sum(1)
                of_shard[2, rows] = torch.where(powers > 0, powers * centred, 0).sum(1)
        tops, sums, weighted = comm.all_gather(partials).unbind(1)
        top = tops.amax(0)
        below = tops - top
        share = below.exp()
        total = (sums * share).sum(0)
        mean = (torch.where(sums > 0, weighted + below * sums, 0) * share).sum(0) / total
        entropy = total.log() - mean
        ctx.save_for_backward(logits, top, total, entropy)
        return entropy

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        logits, top, total, entropy = ctx.saved_tensors
        dz = torch.zeros_like(logits, memory_format=torch.contiguous_format)
        for of_shard, z, (_, valid) in zip(dz, logits, ctx.columns, strict=True):
            for rows in _blocks(z, valid):
                log_q = z[rows, :valid].to(top.dtype) - (top + total.log())[rows, None]
                q = log_q.exp()
                slope = q * (log_q + entropy[rows, None])
                of_shard[rows, :valid] = torch.where(q > 0, slope, 0) * -dh[rows, None]
        return dz, None, None


def _blocks(z: Tensor, num_columns: int) -> Iterator[slice]:
    """Yield ranges of rows to widen at a time; none where all columns are padding."""
    each = max(1, _BLOCK_ELEMENTS // max(1, num_columns))
    return (slice(first, first + each) for first in range(0, len(z) if num_columns else 0, each))


class _GatheredLogits(torch.autograd.Function):
    """z[n, T, C] -> y[T, V] = all_gather over the columns, equal on all ranks;  dz = this rank's columns of dy."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, vocab_size: int, comm: Communicator) -> Tensor:
        ctx.columns, ctx.shape = columns_of(logits, vocab_size, comm), logits.shape
        # By elements: an arena has room for some of them at a time, however long a row is.
        shards = comm.all_gather(logits.reshape(-1)).view(-1, *logits.shape[1:])
        return shards.transpose(0, 1).flatten(1)[:, :vocab_size].contiguous()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dz = dy.new_zeros(ctx.shape)
        for of_shard, (first, valid) in zip(dz, ctx.columns, strict=True):
            of_shard[:, :valid] = dy[:, first : first + valid]
        return dz, None, None


class _GatheredRows(torch.autograd.Function):
    """x[T/tp, D] -> y[T, D] = all_gather(x), equal on all ranks;  dx = this rank's rows of dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.first, ctx.num = comm.rank * len(x), len(x)
        # With one rank a gather returns x itself, which an input of the loss must not be.
        return comm.all_gather(x) if comm.size > 1 else x.view_as(x)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy[ctx.first : ctx.first + ctx.num].contiguous(), None


def token_logprobs(logits: Tensor, labels: Tensor, vocab_size: int, comm: Communicator) -> Tensor:
    """Return the log-probability of each label: p[t] = log softmax(z[t, :V])[labels[t]], 0 where it is ignored.

    Args:
        logits: z[T, V/tp] or z[n, T, V/(n tp)], as vocab_parallel_cross_entropy; they are not overwritten.
        labels: [T] int64, below V, or -100 (ignored); equal on every tp rank.
        vocab_size: V.
        comm: the tp ranks.

    Returns:
        [T] in promote_types(dtype, float32), equal on every rank.

    Raises:
        ValueError: shapes, dtypes or labels that do not fit.

    Cost: one gather of 4*n*T numbers; backward makes one tensor of the logits' size.
    """
    values: Tensor = _TokenLogprobs.apply(checked_shards(logits, labels, vocab_size), labels, vocab_size, comm)
    return values


def entropy(logits: Tensor, vocab_size: int, comm: Communicator) -> Tensor:
    """Return the entropy of each token's distribution, in nats: h[t] = -sum over v < V of q log q, q = softmax(z[t]).

    Args:
        logits, vocab_size, comm: as token_logprobs.

    Returns:
        [T] in promote_types(dtype, float32), equal on every rank.

    Cost: one gather of 3*n*T numbers; 16 MB of widened rows at a time; backward makes one tensor of the logits' size.
    """
    values: Tensor = _Entropy.apply(logits if logits.dim() == 3 else logits[None], vocab_size, comm)
    return values


def whole_logits(logits: Tensor, vocab_size: int, comm: Communicator) -> Tensor:
    """Gather the logits of all columns: [T, V] on every rank, in their dtype, without padding.

    Cost: dear. Each rank receives (tp-1)/tp*T*V elements and holds T*V, twice while it puts them in order.
    """
    values: Tensor = _GatheredLogits.apply(logits if logits.dim() == 3 else logits[None], vocab_size, comm)
    return values


def whole_rows(x: Tensor, comm: Communicator) -> Tensor:
    """Gather the rows of all ranks: y[T, D] of x[T/tp, D]. Cost: each rank receives (tp-1)/tp*T*D elements."""
    values: Tensor = _GatheredRows.apply(x, comm)
    return values
