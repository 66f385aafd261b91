"""The router of a mixture of experts: logits, and which experts each token is sent to with which weights.

    logits[T, E] = x[T, D] @ w[E, D].T                     in float32 (float64 for float64), whatever x's dtype
    experts[T, k], weights[T, k], counts[E] = choose(logits)                          choose.py
    dx = dlogits @ w;  dw = dlogits.T @ x                  dlogits is choose's, plus what the caller adds to the logits'

What is deliberately elsewhere: the choice itself (choose.py), the order of the rows (order.py).

The decision a reader will question: the product is in float32 even where x is in 16 bits. A choice between two experts
whose scores are close would otherwise depend on the rounding; it costs D * E of the experts' 3 * k * D * F products.

Source: Fedus et al., "Switch transformers", arXiv 2101.03961, section 2.4 (a router in float32).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from tpkernels.launch import accumulation_dtype
from tpkernels.ops.experts.choose import ChoiceRule, check_choice, choose, choose_reference


class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
        experts: int32 [T, k], in falling order of score; each token's are different.
        weights: [T, k], float32 or float64.
        counts: int32 [E], the tokens of each expert.
        logits: [T, E], in weights' dtype.
    """

    experts: Tensor
    weights: Tensor
    counts: Tensor
    logits: Tensor


def route_reference(x: Tensor, w: Tensor, bias: Tensor | None, rule: ChoiceRule) -> Routing:
    """Return the routing computed in x's dtype: the specification."""
    logits = x @ w.T
    return Routing(*choose_reference(logits, bias, rule), logits)


def router_logits(x: Tensor, w: Tensor) -> Tensor:
    """Return logits[T, E] = x[T, D] @ w[E, D].T in the wider of x's dtype and float32; recorded by autograd."""
    wide = accumulation_dtype(x.dtype)
    with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
        return x.to(wide) @ w.to(wide).T


def route(
    x: Tensor,
    w: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    scoring: str = "softmax",
    normalize: bool = False,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
) -> Routing:
    """Choose k of E experts for each token, and the weights that their results are added with.

        logits[T, E] = x[T, D] @ w[E, D].T;   score = softmax(logits) or sigmoid(logits)
        experts[T, k] = the k largest of score + bias;  weights[T, k] = scale * score (/ the sum of the k)

    Args:
        x: [T, D], floating point, any strides, possibly without rows: tokens.
        w: [E, D], floating point: the router's weight.
        k, bias, scoring, normalize, scale, num_groups, top_groups: as `choose`. Qwen3-MoE and Mixtral: "softmax",
            normalize. DeepSeek-V3: "sigmoid", normalize, scale 2.5, a bias, 8 groups of which 4.

    Returns:
        Routing: experts int32 [T, k], weights [T, k], counts int32 [E], logits [T, E], the floating-point ones in
        float32, or float64 if x is; differentiable in x and w through weights and logits.

    Raises:
        ValueError: what does not fit.

    Cost: 2 * T * D * E flops forward and twice that backward; x and w are converted to float32 first, a copy each where
    they are not. Keeps x, w, logits, experts and weights. No wait for the host on a GPU.
    Numerics: in float32, or float64 for float64, also under torch.autocast; the product is torch's. Of equal scores the
    lower expert is taken. NaN counts as the largest score, so that it becomes a weight.
    Source: see the module; Shazeer et al., arXiv 1701.06538; DeepSeek-AI, arXiv 2412.19437, section 2.1.2.
    """
    if (
        x.dim() != 2
        or w.dim() != 2
        or x.shape[1] != w.shape[1]
        or not (x.is_floating_point() and w.is_floating_point())
    ):
        raise ValueError(
            f"route takes x[T, D] and w[E, D] of floating-point numbers: x is {tuple(x.shape)} {x.dtype}, w "
            f"{tuple(w.shape)} {w.dtype}: pass matrices with equally many columns"
        )
    # Before the product: a mistake costs nothing.
    check_choice(w.shape[0], bias, ChoiceRule(k, scoring, normalize, scale, num_groups, top_groups))
    logits = router_logits(x, w)
    chosen = choose(
        logits,
        k,
        bias=bias,
        scoring=scoring,
        normalize=normalize,
        scale=scale,
        num_groups=num_groups,
        top_groups=top_groups,
    )
    return Routing(*chosen, logits)
