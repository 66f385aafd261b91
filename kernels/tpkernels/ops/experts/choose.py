"""The experts of each token and their weights, from a router's logits.

    score[T, E] = softmax(logits) over all experts, or sigmoid(logits) of each
    experts[T, k] = those of the k largest score + bias, within the best groups if there are several
    weights[T, k] = scale * score[t, experts], divided by their sum over k first if `normalize`

    mean[T] = (sum over k of weights * dweights) / scale
    dlogits[T, E] = scale * score * (dweights - mean), dweights 0 where not chosen      softmax
    dlogits[t, experts] = weights * (dweights - mean)                                   softmax, normalised
    dlogits[t, experts] = weights * (dweights - mean if `normalize`) * (1 - score)      sigmoid

A normalised softmax of k logits needs nothing of the others, and its gradient is exactly 0 there.

The decision a reader will question: NaN counts as the largest score, as torch.topk has it. So a NaN among the logits is
always chosen, becomes a weight, and is seen; the choice stays inside [0, E), each expert once.

A token's results have the same bits whatever the other tokens are, in the kernels and on the host.

Source: Shazeer et al., "Outrageously large neural networks", arXiv 1701.06538; DeepSeek-AI, "DeepSeek-V3 technical
report", arXiv 2412.19437, section 2.1.2 (sigmoid, bias, groups); the groups are ranked as there, by two experts each.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.derivatives import differentiable_once, refuse_tangents
from tpkernels.launch import accumulation_dtype, by_triton
from tpkernels.ops.experts.choose_kernel import launch_choose, launch_choose_backward

SCORINGS = ("softmax", "sigmoid")
MOST_EXPERTS = 4096
# Added to the sum of sigmoids that weights are divided by: scores may all be 0. As in DeepSeek-V3's code.
_LEAST_SUM = 1e-20


class ChoiceRule(NamedTuple):
    """How experts are chosen and weighted; the operators' schemas hold it as plain numbers.

    Attributes:
        k: experts of a token.
        scoring: "softmax" or "sigmoid".
        normalize: whether the k weights are divided by their sum.
        scale: what weights are multiplied by, above 0.
        num_groups: equal groups of consecutive experts.
        top_groups: how many of them a token may choose from.
    """

    k: int
    scoring: str = "softmax"
    normalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1


class ExpertChoice(NamedTuple):
    """Experts int32 [T, k], in falling order of score; weights [T, k]; counts int32 [E], tokens of each expert."""

    experts: Tensor
    weights: Tensor
    counts: Tensor


def choose_reference(logits: Tensor, bias: Tensor | None, rule: ChoiceRule) -> ExpertChoice:
    """Return the choice computed in logits' dtype: the specification."""
    scores = logits.softmax(1) if rule.scoring == "softmax" else logits.sigmoid()
    keys = scores.detach() if bias is None else scores.detach() + bias
    if rule.num_groups > 1:
        by_group = keys.unflatten(1, (rule.num_groups, -1))
        strengths = by_group.sort(dim=2, descending=True).values[:, :, :2].sum(2)
        worst = strengths.sort(dim=1, descending=True, stable=True).indices[:, rule.top_groups :]
        excluded = torch.zeros_like(strengths, dtype=torch.bool).scatter(1, worst, True)
        keys = by_group.masked_fill(excluded[:, :, None], -torch.inf).flatten(1)
    experts = keys.sort(dim=1, descending=True, stable=True).indices[:, : rule.k]
    weights = scores.gather(1, experts)
    if rule.normalize:
        weights = weights / (weights.sum(1, keepdim=True) + (_LEAST_SUM if rule.scoring == "sigmoid" else 0))
    counts = torch.bincount(experts.reshape(-1), minlength=logits.shape[1])
    return ExpertChoice(experts.int(), weights * rule.scale, counts.int())


def _on_host(logits: Tensor, bias: Tensor | None, rule: ChoiceRule) -> ExpertChoice:
    scores = logits.softmax(1) if rule.scoring == "softmax" else _sigmoid(logits)
    keys = scores if bias is None else scores + bias
    if rule.num_groups > 1:
        by_group = keys.unflatten(1, (rule.num_groups, -1))
        best_groups = _best(by_group.topk(2, dim=2).values.sum(2), rule.top_groups)
        excluded = torch.ones(by_group.shape[:2], dtype=torch.bool).scatter_(1, best_groups, False)
        keys = by_group.masked_fill(excluded[:, :, None], -torch.inf).flatten(1)
    experts = _best(keys, rule.k)
    weights = scores.gather(1, experts)
    if rule.normalize:
        total = _sum_of_columns(weights)
        weights = weights / (total + _LEAST_SUM if rule.scoring == "sigmoid" else total)
    counts = torch.bincount(experts.reshape(-1), minlength=logits.shape[1])
    return ExpertChoice(experts.int(), weights.mul_(rule.scale), counts.int())


def _sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of each element by itself.

    torch computes contiguous numbers in vectors, and what is left over at the end in other bits: those of a token would
    depend on how many there are. Elements apart in memory are computed one by one.
    """
    return x.new_empty(*x.shape, 2)[..., 0].copy_(x).sigmoid()


def _best(keys: Tensor, k: int) -> Tensor:
    """Return the indices int64 [T, k] of the largest keys of each row, in falling order, of equal ones the first."""
    values, places = keys.topk(min(k + 1, keys.shape[1]), dim=1)
    # topk takes any of equal numbers. A row is right if what it found falls all the way; NaN does not.
    falls = (values[:, 1:] < values[:, :-1]).all(1)
    places = places[:, :k].contiguous()
    if not falls.all():
        places[~falls] = keys[~falls].sort(dim=1, descending=True, stable=True).indices[:, :k]
    return places


def _sum_of_columns(x: Tensor) -> Tensor:
    """Return x[T, k] summed over k, [T, 1], one after the other: torch's own order may depend on T."""
    total = x[:, :1].clone()
    for j in range(1, x.shape[1]):
        total += x[:, j : j + 1]
    return total


def _backward_on_host(dweights: Tensor, logits: Tensor, experts: Tensor, weights: Tensor, rule: ChoiceRule) -> Tensor:
    places, dlogits = experts.long(), torch.zeros_like(logits)
    mean = _sum_of_columns(weights * dweights).div_(rule.scale)
    if rule.scoring == "softmax" and not rule.normalize:
        dlogits.scatter_(1, places, dweights)
        return dlogits.sub_(mean).mul_(rule.scale).mul_(logits.softmax(1))
    slopes = weights * (dweights - mean if rule.normalize else dweights)
    if rule.scoring == "sigmoid":
        # 1 - sigmoid(l) is sigmoid(-l), which loses no digits.
        slopes *= _sigmoid(-logits.gather(1, places))
    return dlogits.scatter_(1, places, slopes)


def choose_forward(logits: Tensor, bias: Tensor | None, rule: ChoiceRule) -> ExpertChoice:
    """Run `choose_op` without torch's dispatcher, for callers inside a Function of their own.

    Args:
        logits: [T, E] of float32 or float64.
        bias: [E] of logits' dtype, or None.
    """
    logits = logits.contiguous()
    if not by_triton(logits):
        return _on_host(logits, bias, rule)
    return ExpertChoice(*launch_choose(logits, bias, rule, _LEAST_SUM))


def choose_backward(dweights: Tensor, logits: Tensor, experts: Tensor, weights: Tensor, rule: ChoiceRule) -> Tensor:
    """Run `choose_backward_op` without torch's dispatcher; return dlogits[T, E], new and contiguous."""
    logits = logits.contiguous()
    if not by_triton(logits):
        return _backward_on_host(dweights, logits, experts, weights, rule)
    return launch_choose_backward(dweights.contiguous(), logits, experts.contiguous(), weights.contiguous(), rule)


@torch.library.custom_op("tpkernels::choose", mutates_args=())
def choose_op(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    scoring: str,
    normalize: bool,
    scale: float,
    num_groups: int,
    top_groups: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, experts and counts, new and contiguous; arguments as `choose_forward`'s.

    In this order, since torch.library.opcheck adds up outputs in the dtype of the first.
    """
    rule = ChoiceRule(k, scoring, normalize, scale, num_groups, top_groups)
    experts, weights, counts = choose_forward(logits, bias, rule)
    return weights, experts, counts


@choose_op.register_fake
def _(logits: Tensor, bias: Any, k: int, *rule: Any) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, num_experts = logits.shape
    return (
        logits.new_empty(num_tokens, k),
        logits.new_empty(num_tokens, k, dtype=torch.int32),
        logits.new_empty(num_experts, dtype=torch.int32),
    )


@torch.library.custom_op("tpkernels::choose_backward", mutates_args=())
def choose_backward_op(
    dweights: Tensor, logits: Tensor, experts: Tensor, weights: Tensor, scoring: str, normalize: bool, scale: float
) -> Tensor:
    """Return dlogits[T, E], new and contiguous, from dweights[T, k] and what `choose_op` took and returned."""
    rule = ChoiceRule(experts.shape[1], scoring, normalize, scale)
    return choose_backward(dweights, logits, experts, weights, rule)


@choose_backward_op.register_fake
def _(dweights: Any, logits: Tensor, *rest: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, _, _, *ctx.rule = inputs
    weights, experts, _ = output
    ctx.save_for_backward(logits, experts, weights)


@differentiable_once
def _backward(ctx: Any, dweights: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dlogits = choose_backward_op(dweights, *ctx.saved_tensors, *ctx.rule[:3])
    return dlogits, *(None for _ in range(7))


choose_op.register_autograd(_backward, setup_context=_setup_context)


def check_choice(num_experts: int, bias: Tensor | None, rule: ChoiceRule) -> None:
    """Raise ValueError if a rule cannot choose among so many experts, or the bias is not one number for each."""
    if not 1 <= num_experts <= MOST_EXPERTS or not 1 <= rule.k <= num_experts:
        raise ValueError(
            f"a token chooses k of E experts, 1 <= k <= E <= {MOST_EXPERTS}: k is {rule.k}, E {num_experts}: "
            f"pass a k of at most {num_experts}"
        )
    if rule.scoring not in SCORINGS or not 0 < rule.scale < math.inf:
        raise ValueError(
            f"weights are {' or '.join(SCORINGS)} of the logits times a finite scale above 0: scoring is "
            f"{rule.scoring!r}, scale {rule.scale}: pass one of these, and scale 1.0 for none"
        )
    size, rest = divmod(num_experts, max(1, rule.num_groups))
    if rule.num_groups < 1 or rest or (rule.num_groups > 1 and size < 2):
        raise ValueError(
            f"groups are of equally many experts, at least two: {num_experts} experts in {rule.num_groups} groups: "
            f"pass a num_groups that divides {num_experts} into at least two each"
        )
    if not 1 <= rule.top_groups <= rule.num_groups or rule.top_groups * size < rule.k:
        raise ValueError(
            f"a token's k experts come from top_groups of its num_groups groups: k is {rule.k}, top_groups "
            f"{rule.top_groups} of {rule.num_groups} groups of {size}: pass a top_groups from {-(-rule.k // size)} to "
            f"{rule.num_groups}"
        )
    if bias is not None and (bias.shape != (num_experts,) or not bias.is_floating_point()):
        raise ValueError(
            f"the bias is a floating-point number per expert: bias is {tuple(bias.shape)} {bias.dtype}, experts are "
            f"{num_experts}: pass bias[{num_experts}]"
        )


def choose(
    logits: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    scoring: str = "softmax",
    normalize: bool = False,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
) -> ExpertChoice:
    """Choose k experts for each token and weight them by a router's logits.

        score[T, E] = softmax(logits[T, E]) or sigmoid(logits)
        experts[T, k] = the k largest of score + bias;  weights[T, k] = scale * score (/ the sum of the k)

    Args:
        logits: [T, E], floating point, any strides, possibly without rows.
        k: experts of a token, 1 to E.
        bias: [E], added to the scores for the choice alone; it has no gradient.
        scoring: "softmax" over all experts, or "sigmoid" of each.
        normalize: divide a token's weights by their sum.
        scale: what weights are multiplied by in the end, above 0.
        num_groups: how many groups consecutive experts form, each of at least two.
        top_groups: from how many of them a token chooses: those with the largest sums of their two best score + bias.

    Returns:
        experts int32 [T, k], in falling order of score + bias; weights [T, k] in float32 (float64 for float64); counts
        int32 [E], the tokens of each expert. All new and contiguous; differentiable in logits through weights.

    Raises:
        ValueError: what does not fit.

    Cost: forward reads the logits once; backward reads and writes as many; logits, experts and weights are kept. No
    wait for the host on a GPU.
    Numerics: in float32, or float64 for float64; deterministic, a token's bits do not depend on the others. Of equal
    scores, and of equal groups, the first is taken. NaN counts as the largest.
    Source: see the module.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(
            f"choose takes logits[T, E] of floating-point numbers: they are {tuple(logits.shape)} {logits.dtype}: "
            "reshape or convert them"
        )
    rule = ChoiceRule(k, scoring, normalize, scale, num_groups, top_groups)
    check_choice(logits.shape[1], bias, rule)
    refuse_tangents("choose", logits)
    wide = logits.to(accumulation_dtype(logits.dtype))
    weights, experts, counts = choose_op(wide, None if bias is None else bias.detach().to(wide.dtype), *rule)
    return ExpertChoice(experts, weights, counts)
