"""The choice of experts in Triton: the kernels and their launches. The specification is choose.py's `choose_reference`.

A program has whole rows of logits in registers and looks for their largest numbers one after the other: k times a
maximum over a row, which for k of 8 costs less than reading the row, and no sort.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tpkernels.launch import cdiv, jit, power_of_2, run, tl

# Logits of one program: 16 per thread of 4 warps. Not tuned: no GPU has timed it yet.
_BLOCK_ELEMENTS = 2048


@jit
def _sigmoid(b: tl.tensor) -> tl.tensor:
    """Return the sigmoid of a block; exp of -|b| cannot overflow."""
    e = tl.exp(-tl.abs(b))
    return tl.where(b < 0, e, 1.0) / (1 + e)


@jit
def _softmax(b: tl.tensor) -> tl.tensor:
    """Return the softmax of each row of a block whose padding is -inf."""
    e = tl.exp(b - tl.max(b, axis=1)[:, None])
    return e / tl.sum(e, axis=1)[:, None]


@jit
def _largest(b_keys: tl.tensor, m_left: tl.tensor, o_column: tl.tensor) -> Any:
    """Return (the largest key, the first column that has it) of the columns left in each row; keys are not NaN."""
    largest = tl.max(tl.where(m_left, b_keys, float("-inf")), axis=1)
    m_largest = m_left & (b_keys == largest[:, None])
    return largest, tl.min(tl.where(m_largest, o_column[None, :], 2147483647), axis=1)


@jit
def _within_best_groups(
    b_keys: tl.tensor,
    m_expert: tl.tensor,
    o_expert: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
) -> tl.tensor:
    """Return the keys of the experts in each row's best groups, and -inf for the others."""
    o_group = tl.arange(0, BLOCK_GROUPS)
    # [BLOCK_TOKENS, BLOCK_GROUPS]
    b_strengths = tl.zeros([b_keys.shape[0], BLOCK_GROUPS], b_keys.dtype)
    for group in range(NUM_GROUPS):
        m_group = m_expert & (o_expert // GROUP_SIZE == group)[None, :]
        best, place = _largest(b_keys, m_group, o_expert)
        second, _ = _largest(b_keys, m_group & (o_expert[None, :] != place[:, None]), o_expert)
        b_strengths = tl.where(o_group[None, :] == group, (best + second)[:, None], b_strengths)
    b_strengths = tl.where(b_strengths != b_strengths, float("inf"), b_strengths)
    m_left = (o_group < NUM_GROUPS)[None, :] & (b_strengths == b_strengths)
    m_best = m_expert & (b_keys != b_keys)
    for _ in range(TOP_GROUPS):
        _, group = _largest(b_strengths, m_left, o_group)
        m_left = m_left & (o_group[None, :] != group[:, None])
        m_best = m_best | ((o_expert // GROUP_SIZE)[None, :] == group[:, None])
    return tl.where(m_best, b_keys, float("-inf"))


@jit(do_not_specialize=["num_tokens"])
def _choose_kernel(
    p_logits: tl.tensor,
    p_bias: tl.tensor,
    p_experts: tl.tensor,
    p_weights: tl.tensor,
    p_counts: tl.tensor,
    num_tokens: tl.int64,
    NUM_EXPERTS: tl.constexpr,
    K: tl.constexpr,
    SCORING: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
) -> None:
    """Choose for BLOCK_TOKENS tokens per program, and count how many of them chose each expert."""
    o_token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    o_expert, o_choice = tl.arange(0, BLOCK_EXPERTS), tl.arange(0, BLOCK_K)
    m_token, m_expert = (o_token < num_tokens)[:, None], (o_expert < NUM_EXPERTS)[None, :]
    o_logits = o_token[:, None] * NUM_EXPERTS + o_expert[None, :]
    # [BLOCK_TOKENS, BLOCK_EXPERTS]
    b_logits = tl.load(p_logits + o_logits, mask=m_token & m_expert, other=0.0)
    b_logits = tl.where(m_expert, b_logits, float("-inf"))
    b_scores = _softmax(b_logits) if SCORING == "softmax" else _sigmoid(b_logits)
    b_keys = b_scores
    if p_bias is not None:
        # [BLOCK_EXPERTS]
        b_keys += tl.load(p_bias + o_expert, mask=o_expert < NUM_EXPERTS, other=0.0)[None, :]
    b_keys = tl.where(b_keys != b_keys, float("inf"), b_keys)
    if NUM_GROUPS > 1:
        b_keys = _within_best_groups(
            b_keys, m_expert, o_expert, NUM_GROUPS, TOP_GROUPS, NUM_EXPERTS // NUM_GROUPS, BLOCK_GROUPS
        )
    m_left = m_expert & (b_keys == b_keys)
    # [BLOCK_TOKENS, BLOCK_K]
    b_experts = tl.zeros([BLOCK_TOKENS, BLOCK_K], tl.int32)
    b_weights = tl.zeros([BLOCK_TOKENS, BLOCK_K], b_scores.dtype)
    b_total = tl.zeros([BLOCK_TOKENS], b_scores.dtype)
    for j in range(K):
        _, expert = _largest(b_keys, m_left, o_expert)
        m_chosen = o_expert[None, :] == expert[:, None]
        score = tl.sum(tl.where(m_chosen, b_scores, 0.0), axis=1)
        b_total += score
        b_experts = tl.where(o_choice[None, :] == j, expert[:, None], b_experts)
        b_weights = tl.where(o_choice[None, :] == j, score[:, None], b_weights)
        m_left = m_left & (o_expert[None, :] != expert[:, None])
    if NORMALIZE:
        b_weights /= (b_total + LEAST_SUM)[:, None]
    o_choices, m_choices = o_token[:, None] * K + o_choice[None, :], m_token & (o_choice < K)[None, :]
    tl.store(p_experts + o_choices, b_experts, mask=m_choices)
    tl.store(p_weights + o_choices, b_weights * SCALE, mask=m_choices)
    m_taken = m_token & m_expert & (m_left == 0)
    o_counts = tl.program_id(0).to(tl.int64) * NUM_EXPERTS + o_expert
    tl.store(p_counts + o_counts, tl.sum(m_taken.to(tl.int32), axis=0), mask=o_expert < NUM_EXPERTS)


@jit(do_not_specialize=["num_tokens"])
def _choose_backward_kernel(
    p_dweights: tl.tensor,
    p_logits: tl.tensor,
    p_experts: tl.tensor,
    p_weights: tl.tensor,
    p_dlogits: tl.tensor,
    num_tokens: tl.int64,
    NUM_EXPERTS: tl.constexpr,
    K: tl.constexpr,
    SCORING: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
) -> None:
    """Compute BLOCK_TOKENS rows of dlogits per program."""
    o_token = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    o_expert = tl.arange(0, BLOCK_EXPERTS)
    m_token, m_expert = o_token < num_tokens, (o_expert < NUM_EXPERTS)[None, :]
    o_logits = o_token[:, None] * NUM_EXPERTS + o_expert[None, :]
    b_mean = tl.zeros([BLOCK_TOKENS], p_weights.dtype.element_ty)
    for j in range(K):
        # [BLOCK_TOKENS]
        b_weight = tl.load(p_weights + o_token * K + j, mask=m_token, other=0.0)
        b_mean += b_weight * tl.load(p_dweights + o_token * K + j, mask=m_token, other=0.0)
    b_mean /= SCALE
    DENSE: tl.constexpr = SCORING == "softmax" and not NORMALIZE
    # [BLOCK_TOKENS, BLOCK_EXPERTS]
    b_dlogits = tl.zeros([BLOCK_TOKENS, BLOCK_EXPERTS], p_weights.dtype.element_ty)
    for j in range(K):
        # [BLOCK_TOKENS]
        expert = tl.load(p_experts + o_token * K + j, mask=m_token, other=0)
        b_slope = tl.load(p_dweights + o_token * K + j, mask=m_token, other=0.0)
        if not DENSE:
            if NORMALIZE:
                b_slope -= b_mean
            b_slope *= tl.load(p_weights + o_token * K + j, mask=m_token, other=0.0)
        if SCORING == "sigmoid":
            m_inside = m_token & (expert >= 0) & (expert < NUM_EXPERTS)
            # 1 - sigmoid(b) is sigmoid(-b), which loses no digits.
            b_slope *= _sigmoid(-tl.load(p_logits + o_token * NUM_EXPERTS + expert, mask=m_inside, other=0.0))
        b_dlogits += tl.where(o_expert[None, :] == expert[:, None], b_slope[:, None], 0.0)
    if DENSE:
        # [BLOCK_TOKENS, BLOCK_EXPERTS]
        b_logits = tl.load(p_logits + o_logits, mask=m_token[:, None] & m_expert, other=0.0)
        b_dlogits = (b_dlogits - b_mean[:, None]) * SCALE * _softmax(tl.where(m_expert, b_logits, float("-inf")))
    tl.store(p_dlogits + o_logits, b_dlogits, mask=m_token[:, None] & m_expert)


def _block(num_experts: int) -> dict[str, int]:
    """Return the block; it depends on the experts alone, so that a token's bits do not depend on the others."""
    columns = power_of_2(num_experts)
    return {"BLOCK_TOKENS": max(1, min(64, _BLOCK_ELEMENTS // columns)), "BLOCK_EXPERTS": columns, "num_warps": 4}


def launch_choose(logits: Tensor, bias: Tensor | None, rule: Any, least_sum: float) -> tuple[Tensor, Tensor, Tensor]:
    """Run the operator tpkernels::choose with its kernel, on contiguous logits; rule is a ChoiceRule."""
    num_tokens, num_experts = logits.shape
    block = _block(num_experts)
    num_programs = cdiv(num_tokens, block["BLOCK_TOKENS"])
    experts = logits.new_empty(num_tokens, rule.k, dtype=torch.int32)
    weights = logits.new_empty(num_tokens, rule.k)
    counts = logits.new_empty(num_programs, num_experts, dtype=torch.int32)
    run(
        _choose_kernel,
        (num_programs,),
        logits,
        None if bias is None else bias.contiguous(),
        experts,
        weights,
        counts,
        num_tokens,
        NUM_EXPERTS=num_experts,
        K=rule.k,
        SCORING=rule.scoring,
        NORMALIZE=rule.normalize,
        SCALE=float(rule.scale),
        LEAST_SUM=least_sum if rule.scoring == "sigmoid" else 0.0,
        NUM_GROUPS=rule.num_groups,
        TOP_GROUPS=rule.top_groups,
        BLOCK_K=power_of_2(rule.k),
        BLOCK_GROUPS=power_of_2(rule.num_groups),
        **block,
    )
    return experts, weights, counts.sum(0, dtype=torch.int32)


def launch_choose_backward(dweights: Tensor, logits: Tensor, experts: Tensor, weights: Tensor, rule: Any) -> Tensor:
    """Run the operator tpkernels::choose_backward with its kernel, on contiguous tensors; rule is a ChoiceRule."""
    num_tokens, num_experts = logits.shape
    dlogits = torch.empty_like(logits)
    block = _block(num_experts)
    run(
        _choose_backward_kernel,
        (cdiv(num_tokens, block["BLOCK_TOKENS"]),),
        dweights,
        logits,
        experts,
        weights,
        dlogits,
        num_tokens,
        NUM_EXPERTS=num_experts,
        K=rule.k,
        SCORING=rule.scoring,
        NORMALIZE=rule.normalize,
        SCALE=float(rule.scale),
        **block,
    )
    return dlogits
