"""Output projection and cross-entropy in one, one chunk of tokens at a time: the logits are never all in memory.

    z[Tc, V/tp] = x[Tc, D] @ w[V/tp, D].T                          Tc tokens; the vocabulary is cut over tp
    loss = sum over tokens of token_weight * loss[t]               loss[t] as in operator.py
    dz[Tc, V/tp] written over z, with token_weight as its slope
    dx[Tc, D] = dz @ w                                             partial(tp)
    dw[V/tp, D] += dz.T @ x                                        this rank's rows, complete

The decision a reader will question: the gradients are computed in forward, where a chunk's logits exist. Having them
again in backward (Wijmans et al.) would be a fourth matmul beside three. The price: a token's weight must be known in
forward, so the loss is a weighted sum and not a tensor of losses; and dx[T, D] and dw[V/tp, D] are kept until backward,
which only scales them.

`combine` is a Python callable, because gathering partials may be anything. No schema of an operator can hold one, so
this is a torch.autograd.Function around the operators of operator.py.

Source: Hsu et al., "Liger Kernel", arXiv 2410.10989, section 3; Wijmans et al., "Cut your losses in large-vocabulary
language models", arXiv 2411.09009.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.autocast import lowered
from tpkernels.derivatives import differentiable_once
from tpkernels.launch import accumulation_dtype
from tpkernels.ops.cross_entropy.operator import (
    check_smoothing,
    combine_partials,
    cross_entropy_gradient_,
    cross_entropy_partials,
    cross_entropy_reference,
    token_losses,
)
from tpkernels.ops.matmul.host import rows_apart
from tpkernels.ops.matmul.wgrad import accumulate_wgrad, adds_in_place

Combine = Callable[[Tensor], Tensor]

# Rows of dw that one product computes.
_DW_ROWS = 4096
# With fewer tokens a matmul's tiles are half empty, and a pass over dw does too little work.
_FEWEST_TOKENS = 128


def linear_cross_entropy_reference(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    vocab_size: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the loss in the accumulation dtype, computed in x's dtype: the specification."""
    losses = cross_entropy_reference((x @ weight.T)[:, :vocab_size], labels, label_smoothing, z_loss)
    return (losses * token_weights).sum()


def default_chunk_tokens(num_tokens: int) -> int:
    """Return how many tokens' logits exist together: at most an eighth of all, in multiples of 128, at least 128."""
    return max(_FEWEST_TOKENS, num_tokens // 8 // _FEWEST_TOKENS * _FEWEST_TOKENS)


class _Settings(NamedTuple):
    """All arguments that are not tensors.

    Attributes:
        vocab_size, first_column, label_smoothing, z_loss, combine: as linear_cross_entropy.
        chunk_tokens: tokens per chunk.
        wants_dx, wants_dw: whether backward may need them.
    """

    vocab_size: int
    first_column: int
    label_smoothing: float
    z_loss: float
    combine: Combine | None
    chunk_tokens: int
    wants_dx: bool
    wants_dw: bool


class _LinearCrossEntropy(torch.autograd.Function):
    """Local shapes: x[T, D], w[V/tp, D], labels[T], token_weights[T] -> loss[], equal on all ranks.

    forward, for each chunk of Tc tokens:
      z = x @ w.T;  partials[4, Tc] gathered from all ranks;  losses[Tc];  dz over z;  dx = dz @ w;  dw += dz.T @ x
    dgrad:  dx *= dloss        partial(tp)
    wgrad:  dw *= dloss

    Both are scaled in place, so that no second copy exists: a second backward raises.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor, settings: _Settings
    ) -> Tensor:
        wide = accumulation_dtype(x.dtype)
        losses = x.new_empty(len(x), dtype=wide)
        dx = x.new_empty(x.shape) if settings.wants_dx else None
        dw = weight.new_zeros(weight.shape, dtype=wide) if settings.wants_dw else None
        z = x.new_empty(min(len(x), settings.chunk_tokens), len(weight))
        for first in range(0, len(x), settings.chunk_tokens):
            rows = slice(first, first + settings.chunk_tokens)
            dz = torch.mm(rows_apart(x[rows]), weight.T, out=z[: len(x[rows])])
            losses[rows] = _losses_and_gradient_(dz, labels[rows], token_weights[rows], settings)
            if dx is not None:
                torch.mm(dz, weight, out=dx[rows])
            if dw is not None:
                # In blocks, unless a kernel adds in place: each product is a temporary tensor before it is added.
                num_rows = max(len(dw), 1) if adds_in_place(dw, x) else _DW_ROWS
                for dw_block, dz_block in zip(dw.split(num_rows), dz.split(num_rows, dim=1), strict=True):
                    accumulate_wgrad(dw_block, dz_block, x[rows])
        ctx.save_for_backward(dx, dw)
        ctx.weight_dtype = weight.dtype
        return (losses * token_weights).sum()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        dloss = dloss.view(1, 1)  # a tensor without dims would first be rounded to dx's dtype: a loss scale overflows
        dx = None if dx is None else torch.mul(dx, dloss, out=dx)
        dw = None if dw is None else dw.mul_(dloss).to(ctx.weight_dtype)
        return dx, dw, None, None, None


def _losses_and_gradient_(z: Tensor, labels: Tensor, token_weights: Tensor, settings: _Settings) -> Tensor:
    """Return the losses of some tokens; overwrite their logits with the gradient if one is wanted."""
    num_columns = min(max(settings.vocab_size - settings.first_column, 0), z.shape[1])
    partials = cross_entropy_partials(z, labels, first_column=settings.first_column, num_columns=num_columns)
    combined = combine_partials(partials[None] if settings.combine is None else settings.combine(partials))
    if settings.wants_dx or settings.wants_dw:
        cross_entropy_gradient_(
            z,
            labels,
            combined,
            token_weights,
            settings.vocab_size,
            first_column=settings.first_column,
            num_columns=num_columns,
            label_smoothing=settings.label_smoothing,
            z_loss=settings.z_loss,
        )
    return token_losses(
        combined, labels, settings.vocab_size, label_smoothing=settings.label_smoothing, z_loss=settings.z_loss
    )


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor | float = 1.0,
    *,
    vocab_size: int | None = None,
    first_column: int = 0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    combine: Combine | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Project to the vocabulary and return the weighted sum of the tokens' cross-entropies, without all logits.

        loss = sum over t of token_weights[t] * cross_entropy(x @ w.T)[t]
        dx[T, D] = dloss * dz @ w, partial(tp);   dw[V/tp, D] = dloss * dz.T @ x

    Args:
        x: [T, D], floating point, any strides, every token on every tp rank.
        weight: [V/tp, D] of x's dtype, any strides: this rank's rows of the output projection.
        labels: [T] int64, global columns, equal on every rank, or -100 (ignored).
        token_weights: [T], or one number for all: for a mean, 1 / (valid targets of the global step). It gets no
            gradient. In float16 it must include the loss's scale too: gradients are rounded before dloss is known.
        vocab_size: V; rows of weight whose global number is V or more are padding. By default there is no padding. With
            `combine` it must be given, since one rank cannot know it.
        first_column: the global number of weight's first row.
        label_smoothing, z_loss: as tpkernels.ops.cross_entropy.operator.token_losses.
        combine: returns partials[n, 4, Tc] of the n ranks, in order, for this rank's partials[4, Tc]; called once per
            chunk: `lambda partials: comm.all_gather(partials[None])`. By default this rank has the whole vocabulary.
        chunk_tokens: tokens whose logits exist together, equal on every rank; by default default_chunk_tokens.

    Returns:
        Scalar in float32 (float64 for float64), equal on every rank; NaN where token_losses has NaN.

    Raises:
        ValueError: shapes, dtypes or numbers that do not fit.
        RuntimeError: a second backward.

    Cost: 6*T*D*V/tp flops, all in forward, 2*T*D*V/tp if neither x nor weight needs a gradient. Every chunk reads and
    writes its logits twice, reads weight twice, and reads and writes dw. Keeps dx and, in the accumulation dtype, dw;
    in addition a chunk's logits and 4096 rows of dw: in 16 bits that is less than all logits from about 2 D tokens on.
    Order: each chunk waits for its partials.
    Numerics: logits and dz are rounded to x's dtype; losses, and the sum of dw over chunks, are in float32 (float64 for
    float64); deterministic if matmuls are.
    Source: Liger Kernel, arXiv 2410.10989, which takes the mean itself and casts dw each time.
    """
    x, weight = lowered(x, weight)
    token_weights = _check(x, weight, labels, token_weights)
    check_smoothing(label_smoothing, z_loss)
    if combine is None:
        vocab_size = len(weight) if vocab_size is None else vocab_size
        if first_column or not 0 < vocab_size <= len(weight):
            raise ValueError(
                f"without combine the whole vocabulary is here: weight {tuple(weight.shape)}, vocab_size {vocab_size}, "
                f"first_column {first_column}: pass combine, or all rows of weight"
            )
    if vocab_size is None or vocab_size < 1 or first_column < 0:
        raise ValueError(
            f"with combine a rank has to know its place in the vocabulary: vocab_size {vocab_size}, first_column "
            f"{first_column}: pass vocab_size without padding, and the global number of weight's first row"
        )
    chunk_tokens = default_chunk_tokens(len(x)) if chunk_tokens is None else chunk_tokens
    if chunk_tokens < 1:
        raise ValueError(f"a chunk has at least one token: got {chunk_tokens}: leave chunk_tokens out for the default")
    wants = (torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, weight))
    settings = _Settings(vocab_size, first_column, label_smoothing, z_loss, combine, chunk_tokens, *wants)
    loss: Tensor = _LinearCrossEntropy.apply(x, weight, labels, token_weights, settings)
    return loss


def _check(x: Tensor, weight: Tensor, labels: Tensor, token_weights: Tensor | float) -> Tensor:
    """Return token_weights as [T] in the accumulation dtype; raise if tensors do not fit."""
    fits = x.dim() == weight.dim() == 2 and x.shape[1] == weight.shape[1] and labels.shape == x.shape[:1]
    if not fits or x.dtype != weight.dtype or not x.is_floating_point():
        raise ValueError(
            f"linear_cross_entropy takes x[T, D], weight[V, D] of one floating-point dtype and labels[T]: x "
            f"{tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype}, labels {tuple(labels.shape)}: "
            "flatten x and labels to tokens"
        )
    if not isinstance(token_weights, Tensor):
        return torch.full(labels.shape, token_weights, dtype=accumulation_dtype(x.dtype), device=x.device)
    if token_weights.shape != labels.shape or token_weights.requires_grad:
        raise ValueError(
            f"token_weights are one number, or [T] without gradient: got {tuple(token_weights.shape)} for "
            f"{len(labels)} tokens, requires_grad={token_weights.requires_grad}: expand and detach them"
        )
    return token_weights.to(accumulation_dtype(x.dtype))
