"""Cross-entropy over logits whose vocabulary is cut over tensor-parallel ranks, its gradient written over the logits.

    each shard z[T, C], C = V/tp columns:  m = max z;  s = sum of exp(z - m);  t = z[label] if it is here;  u = sum of z
    all shards together:                   M = max of m;  S = sum of s * exp(m - M);  lse = M + log S;  t, u summed
    loss[T] = (1 - eps) * (lse - t) + eps * (lse - u / V) + z_loss * lse^2                    0 for ignored labels
    dz[T, C] = slope * (softmax(z) * (1 + 2 * z_loss * lse) - (1 - eps) * onehot(label) - eps / V)

Forward reads the logits once (an online softmax), backward reads and overwrites them once. In between, the caller
gathers 4*T numbers from each shard; `cross_entropy` does everything on one rank. linear.py also computes the logits, a
chunk at a time.

The decision a reader will question: M and S are kept separately, although lse alone would do. With a logit of 1e4 the
float32 sum M + log S keeps only three digits of log S, and so would every probability exp(z - lse); exp(z - M) / S
keeps all digits.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867; Shoeybi et al.,
"Megatron-LM", arXiv 1909.08053, section 3; Chowdhery et al., "PaLM", arXiv 2204.02311, section 5 (z-loss); Szegedy et
al., "Rethinking the Inception architecture", arXiv 1512.00567, section 7 (label smoothing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tpkernels.derivatives import differentiable_once, refuse_tangents
from tpkernels.launch import accumulation_dtype, as_operator, by_triton, exp_
from tpkernels.ops.cross_entropy.kernel import (
    IGNORED_LABEL,
    empty_partials,
    launch_cross_entropy_gradient_,
    launch_cross_entropy_partials,
)

# A float32 block of 1 MB: with smaller blocks calls take too long (AMD EPYC, one core, V = 16032).
_HOST_BLOCK_ELEMENTS = 1 << 18


class CombinedPartials(NamedTuple):
    """Statistics of each token over all shards' columns, from `combine_partials`.

    Attributes:
        max_logit: [T], M, the largest logit.
        exp_sum: [T], S, the sum of exp(z - M).
        target: [T], the label's logit; 0 if no shard has the label.
        logit_sum: [T], the sum of the logits.
    """

    max_logit: Tensor
    exp_sum: Tensor
    target: Tensor
    logit_sum: Tensor

    @property
    def lse(self) -> Tensor:
        """Return [T], the logarithm of the sum of exp(z)."""
        return self.max_logit + self.exp_sum.log()


def cross_entropy_reference(
    logits: Tensor, labels: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Return losses[T] in the accumulation dtype, computed in logits' dtype: the specification."""
    losses = F.cross_entropy(
        logits, labels, ignore_index=IGNORED_LABEL, reduction="none", label_smoothing=label_smoothing
    )
    if z_loss:
        losses = losses + (z_loss * logits.logsumexp(1).square()).masked_fill(labels == IGNORED_LABEL, 0)
    return losses.to(accumulation_dtype(logits.dtype))


def _host_blocks(logits: Tensor) -> Iterator[slice]:
    """Yield ranges of rows that stay in a core's cache from one pass to the next."""
    num_rows = max(1, _HOST_BLOCK_ELEMENTS // max(1, logits.shape[1]))
    return (slice(first, first + num_rows) for first in range(0, logits.shape[0], num_rows))


def _partials_on_host(logits: Tensor, labels: Tensor, first_column: int, num_columns: int) -> Tensor:
    partials = empty_partials(logits).zero_()
    partials[0] = -torch.inf
    if not num_columns:
        return partials
    logits = logits[:, :num_columns]
    column = labels - first_column
    mine = (column >= 0) & (column < num_columns)
    partials[2] = logits.gather(1, (column * mine)[:, None])[:, 0].masked_fill_(~mine, 0)
    memory = None
    for rows in _host_blocks(logits):
        z = logits[rows].to(partials.dtype)
        top, total, _, logit_sum = partials[:, rows]
        torch.amax(z, 1, out=top)
        torch.sum(z, 1, out=logit_sum)
        memory = torch.empty_like(z) if memory is None else memory
        powers = torch.sub(z, top[:, None], out=memory[: len(z)])
        torch.sum(exp_(powers), 1, out=total)
    partials[1].masked_fill_(partials[0] == -torch.inf, 0)  # otherwise NaN, from -inf - -inf
    return partials


def _gradient_on_host_(
    logits: Tensor,
    labels: Tensor,
    max_logit: Tensor,
    exp_sum: Tensor,
    slopes: Tensor,
    vocab_size: int,
    first_column: int,
    num_columns: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    logits[:, num_columns:] = 0
    z = logits[:, :num_columns]
    is_nowhere = (labels != IGNORED_LABEL) & ((labels < 0) | (labels >= vocab_size))
    slopes = slopes.to(max_logit.dtype).masked_fill(is_nowhere, torch.nan)
    growth = 2 * z_loss * (max_logit + exp_sum.log()) if z_loss else torch.zeros_like(exp_sum)
    factors = slopes * (1 + growth) / exp_sum
    spread = slopes * (label_smoothing / vocab_size)
    column = labels - first_column
    (mine,) = ((column >= 0) & (column < num_columns)).nonzero(as_tuple=True)
    targets = mine, column[mine]
    p = (z[targets] - max_logit[mine]).exp_().div_(exp_sum[mine])
    # p - 1 is computed before the z-loss: it is exact for p near 1, while p * (1 + growth) - 1 would not be.
    of_targets = slopes[mine] * (p - (1 - label_smoothing + label_smoothing / vocab_size) + p * growth[mine])
    for rows in _host_blocks(z):
        block = z[rows]
        dz = block.to(max_logit.dtype)
        exp_(dz.sub_(max_logit[rows, None])).mul_(factors[rows, None])
        if label_smoothing:
            dz.sub_(spread[rows, None])
        block.copy_(dz)  # if dz is not the block itself, as for 16 bits
    z[targets] = of_targets.to(z.dtype)
    logits.index_fill_(0, (labels == IGNORED_LABEL).nonzero()[:, 0], 0)


def _partials(logits: Tensor, labels: Tensor, first_column: int, num_columns: int) -> Tensor:
    partials = launch_cross_entropy_partials if by_triton(logits) else _partials_on_host
    return partials(logits, labels, first_column, num_columns)


@torch.library.custom_op("tpkernels::cross_entropy_partials", mutates_args=())
def partials_op(logits: Tensor, labels: Tensor, first_column: int, num_columns: int) -> Tensor:
    """Return partials[4, T] of one shard's columns: m, s, t, u."""
    return _partials(logits, labels, first_column, num_columns)


@partials_op.register_fake
def _(logits: Tensor, labels: Tensor, first_column: int, num_columns: int) -> Tensor:
    return empty_partials(logits)


@torch.library.custom_op("tpkernels::cross_entropy_gradient_", mutates_args=("logits",))
def gradient_op_(
    logits: Tensor,
    labels: Tensor,
    max_logit: Tensor,
    exp_sum: Tensor,
    slopes: Tensor,
    vocab_size: int,
    first_column: int,
    num_columns: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """Overwrite one shard's columns with their gradient."""
    gradient_ = launch_cross_entropy_gradient_ if by_triton(logits) else _gradient_on_host_
    gradient_(
        logits,
        labels,
        max_logit,
        exp_sum,
        slopes,
        vocab_size,
        first_column,
        num_columns,
        label_smoothing,
        z_loss,
    )


@gradient_op_.register_fake
def _(logits: Tensor, *_: Any) -> None:
    return None


def partials_of(logits: Tensor, labels: Tensor, first_column: int, num_columns: int) -> Tensor:
    """Return partials_op's result; for the forward of a Function, without checks."""
    return (partials_op if as_operator(logits) else _partials)(logits, labels, first_column, num_columns)


def gradient_of_(
    logits: Tensor,
    labels: Tensor,
    max_logit: Tensor,
    exp_sum: Tensor,
    slopes: Tensor,
    vocab_size: int,
    first_column: int,
    num_columns: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> None:
    """Run gradient_op_; for the backward of a Function, without checks."""
    if as_operator(logits):
        write: Callable[..., None] = gradient_op_
    else:
        write = launch_cross_entropy_gradient_ if by_triton(logits) else _gradient_on_host_
        # Autograd does not notice what a kernel writes.
        torch.autograd.graph.increment_version(logits)
    sizes = vocab_size, first_column, num_columns
    write(logits, labels, max_logit, exp_sum, slopes, *sizes, label_smoothing, z_loss)


@torch.library.custom_op("tpkernels::cross_entropy", mutates_args=())
def cross_entropy_op(
    logits: Tensor, labels: Tensor, label_smoothing: float, z_loss: float, keeps_logits: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (losses, M, S) of whole rows; the gradient overwrites the logits unless `keeps_logits`."""
    vocab_size = logits.shape[1]
    combined = combine_partials(partials_op(logits, labels, 0, vocab_size)[None])
    losses = token_losses(combined, labels, vocab_size, label_smoothing=label_smoothing, z_loss=z_loss)
    return losses, combined.max_logit, combined.exp_sum


@cross_entropy_op.register_fake
def _(
    logits: Tensor, labels: Tensor, label_smoothing: float, z_loss: float, keeps_logits: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.new_empty(logits.shape[0], dtype=accumulation_dtype(logits.dtype))
    return rows, torch.empty_like(rows), torch.empty_like(rows)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, labels, *ctx.smoothing, ctx.keeps_logits = inputs
    ctx.save_for_backward(logits, labels, *output[1:])
    ctx.set_materialize_grads(False)


@differentiable_once
def _backward(ctx: Any, dlosses: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dlosses is None:
        return None, None, None, None, None
    logits, labels, max_logit, exp_sum = ctx.saved_tensors
    logits = logits.detach().clone() if ctx.keeps_logits else logits.detach()
    vocab_size = logits.shape[1]
    gradient_op_(logits, labels, max_logit, exp_sum, dlosses, vocab_size, 0, vocab_size, *ctx.smoothing)
    return logits, None, None, None, None


cross_entropy_op.register_autograd(_backward, setup_context=_setup_context)


def check_logits(logits: Tensor, labels: Tensor, first_column: int, num_columns: int) -> None:
    if logits.dim() != 2 or not logits.is_floating_point() or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"cross-entropy takes logits[T, columns] of floating-point numbers and labels[T]: logits "
            f"{tuple(logits.shape)} {logits.dtype}, labels {tuple(labels.shape)}: flatten both to tokens"
        )
    if labels.dtype != torch.int64:
        raise ValueError(f"cross-entropy takes int64 labels: got {labels.dtype}: convert them by labels.long()")
    if first_column < 0 or not 0 <= num_columns <= logits.shape[1]:
        raise ValueError(
            f"a shard has 0 to {logits.shape[1]} columns that are not padding, from a column >= 0 on: num_columns "
            f"{num_columns}, first_column {first_column}: clamp vocab_size - first_column to that range"
        )


def check_smoothing(label_smoothing: float, z_loss: float) -> None:
    """Raise ValueError unless 0 <= label_smoothing <= 1 and z_loss >= 0."""
    if not 0 <= label_smoothing <= 1 or not z_loss >= 0:
        raise ValueError(
            f"label_smoothing must lie in [0, 1] and z_loss be at least 0: got {label_smoothing} and {z_loss}: "
            "pass 0 to leave one out"
        )


def must_keep(logits: Tensor) -> bool:
    """Return whether logits share the memory of a leaf of autograd: a parameter, or another tensor that a user holds.

    Their gradient needs memory of its own: `z -= lr * z.grad` is wrong if both share memory. Always true under
    torch.compile: for a traced tensor it cannot be known, not even in the operator, whose inputs are never leaves.
    """
    if torch.compiler.is_compiling():
        return True
    return (logits if logits._base is None else logits._base).is_leaf


def check_writable(logits: Tensor) -> None:
    """Raise if elements of logits share memory, as those of an expanded tensor do."""
    if any(stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True)):
        raise ValueError(
            f"the gradient is written over the logits, whose elements may not share memory: strides "
            f"{logits.stride()} of {tuple(logits.shape)}: pass logits.contiguous()"
        )


def cross_entropy_partials(
    logits: Tensor, labels: Tensor, *, first_column: int = 0, num_columns: int | None = None
) -> Tensor:
    """Reduce one shard's logits to four numbers per token.

        partials[:, T] = max z,  sum of exp(z - max z),  z[label],  sum of z    over z = logits[:, :num_columns]

    Args:
        logits: [T, C], floating point, any strides: this shard's columns.
        labels: [T] int64, global columns; z[label] is 0 if the label is another shard's or -100 (ignored).
        first_column: the global number of the shard's first column.
        num_columns: columns from here on are padding of the vocabulary and are ignored; by default there is none.

    Returns:
        [4, T], float32 (float64 for float64), new. A shard of padding only has -inf, 0, 0, 0. It has no gradient: use
        cross_entropy_gradient_.

    Raises:
        ValueError: shapes, dtypes or columns that do not fit.

    Cost: reads the logits once.
    Numerics: float32 (float64 for float64); deterministic.
    Source: Milakov and Gimelshein, arXiv 1805.02867.
    """
    num_columns = logits.shape[-1] if num_columns is None else num_columns
    check_logits(logits, labels, first_column, num_columns)
    refuse_tangents("cross_entropy_partials", logits)
    partials: Tensor = partials_op(logits, labels, first_column, num_columns)
    return partials


def combine_partials(partials: Tensor) -> CombinedPartials:
    """Combine the partials of all shards.

    Args:
        partials: [n, 4, T], of n >= 1 shards in the vocabulary's order, the same on every rank.

    Returns:
        CombinedPartials of new tensors [T]. A token whose logits are all -inf has NaN, as its softmax does.

    Numerics: shards are added as torch.sum does over them: the same bits on ranks that hold the same partials.
    """
    tops, sums, targets, logit_sums = partials.unbind(1)
    top = tops.amax(0)
    return CombinedPartials(top, (sums * (tops - top).exp()).sum(0), targets.sum(0), logit_sums.sum(0))


def token_losses(
    combined: CombinedPartials, labels: Tensor, vocab_size: int, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Return each token's loss from the statistics of all shards.

        loss[T] = (1 - eps) * (lse - z[label]) + eps * (lse - mean z) + z_loss * lse^2,  0 where ignored

    Args:
        combined: of all shards.
        labels: [T] int64.
        vocab_size: V, columns of all shards without padding.
        label_smoothing: eps, the share of the label's weight that is spread over the vocabulary.
        z_loss: weight of lse^2, which keeps the logits near 0.

    Returns:
        [T] in combined's dtype. NaN for a label that is neither in the vocabulary nor -100: raising an error would have
        to wait for the device.

    Raises:
        ValueError: label_smoothing or z_loss outside their range.
    """
    check_smoothing(label_smoothing, z_loss)
    top, exp_sum, target, logit_sum = combined
    losses = exp_sum.log() + (1 - label_smoothing) * (top - target)
    if label_smoothing:  # else a logit of -inf would make 0 * inf
        losses = losses + label_smoothing * (top - logit_sum / vocab_size)
    if z_loss:
        losses = losses + z_loss * combined.lse.square()
    losses = losses.masked_fill((labels < 0) | (labels >= vocab_size), torch.nan)
    return losses.masked_fill(labels == IGNORED_LABEL, 0)


def cross_entropy_gradient_(
    logits: Tensor,
    labels: Tensor,
    combined: CombinedPartials,
    slopes: Tensor,
    vocab_size: int,
    *,
    first_column: int = 0,
    num_columns: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> None:
    """Overwrite one shard's logits with the gradient of sum(slopes * token_losses).

        dz[T, C] = slope * (softmax(z) * (1 + 2 * z_loss * lse) - (1 - eps) * onehot(label) - eps / V)

    Args:
        logits: [T, C] as for cross_entropy_partials, any strides, without elements that share memory; overwritten.
        labels, first_column, num_columns: as cross_entropy_partials.
        combined: of all shards.
        slopes: [T], floating point, the gradient of each token's loss: for a mean 1 / (valid targets).
        vocab_size, label_smoothing, z_loss: as token_losses.

    Raises:
        ValueError: arguments that do not fit.

    Cost: reads and writes the logits once.
    Numerics: float32 (float64 for float64), rounded once. Rows of ignored labels and columns of padding become 0,
    whatever they held; rows of a label that is neither in the vocabulary nor -100 become NaN, as their losses are.
    """
    num_columns = logits.shape[-1] if num_columns is None else num_columns
    check_logits(logits, labels, first_column, num_columns)
    check_smoothing(label_smoothing, z_loss)
    check_writable(logits)
    if slopes.shape != labels.shape:
        raise ValueError(
            f"every token needs its slope: slopes {tuple(slopes.shape)}, labels {tuple(labels.shape)}: expand slopes"
        )
    gradient_op_(
        logits,
        labels,
        combined.max_logit,
        combined.exp_sum,
        slopes,
        vocab_size,
        first_column,
        num_columns,
        label_smoothing,
        z_loss,
    )


def cross_entropy(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    """Return each token's cross-entropy; backward overwrites the logits with their gradient.

        loss[T] = (1 - eps) * (lse - z[label]) + eps * (lse - mean z) + z_loss * lse^2,  0 where ignored
        dz[T, V] = dloss * (softmax(z) * (1 + 2 * z_loss * lse) - (1 - eps) * onehot(label) - eps / V)

    Args:
        logits: z[T, V], floating point, any strides, V > 0. After backward they hold dz, so read them before. They must
            not come from an operator that keeps its output for backward, such as tanh; autograd raises if they do. A
            leaf of autograd, or a view of one, is not overwritten and gets a gradient in memory of its own; neither are
            logits under torch.compile.
        labels: [T] int64 below V, or -100 (ignored).
        label_smoothing, z_loss: as token_losses.

    Returns:
        [T], float32 (float64 for float64), new. Not their mean: the number of valid targets to divide by is that of the
        global step, which only the caller knows. NaN for other labels, and for a row of only -inf, as in torch; the
        gradients of such rows are NaN too.

    Raises:
        ValueError: shapes, dtypes or numbers that do not fit.
        RuntimeError: a second backward of logits that are not a leaf: autograd finds them changed.

    Cost: forward reads the logits once; backward reads and writes them once, or copies them first if they are not
    overwritten; keeps them and 2*T numbers. On a CPU several passes over some rows at a time.
    Numerics: float32 (float64 for float64), the gradient rounded once; deterministic.
    Source: Milakov and Gimelshein, arXiv 1805.02867; z-loss: arXiv 2204.02311; label smoothing: arXiv 1512.00567.
    """
    check_logits(logits, labels, 0, logits.shape[-1] if logits.dim() else 0)
    check_smoothing(label_smoothing, z_loss)
    if not logits.shape[1]:
        raise ValueError(f"cross-entropy takes logits of at least one column: got {tuple(logits.shape)}: pass [T, V]")
    keeps_logits = must_keep(logits)
    if logits.requires_grad and torch.is_grad_enabled() and not keeps_logits:
        check_writable(logits)
    refuse_tangents("cross_entropy", logits)
    losses: Tensor = cross_entropy_op(logits, labels, label_smoothing, z_loss, keeps_logits)[0]
    return losses
