"""Plain torch in the place of tpkernels.ops.experts, until that is there."""

from __future__ import annotations

import torch
from torch import Tensor


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
) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    ranked = scores.detach() if bias is None else scores.detach() + bias
    if num_groups > 1:
        groups = ranked.view(len(ranked), num_groups, -1)
        best = groups.topk(2, -1).values.sum(-1).argsort(-1, descending=True, stable=True)[:, :top_groups]
        allowed = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
        ranked = groups.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
    experts = ranked.argsort(-1, descending=True, stable=True)[:, :k]
    weights = scores.gather(1, experts)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts.int(), weights * scale


def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    flat = experts.flatten()
    order = flat.argsort(stable=True).int()
    counts = torch.bincount(flat.long(), minlength=num_experts)
    return order, torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


def take_rows(x: Tensor, order: Tensor, k: int) -> Tensor:
    return x[order.long() // k]


def combine_rows(ys: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    rows = torch.empty_like(ys).index_copy(0, order.long(), ys).view(*weights.shape, -1)
    total = rows[:, 0] * weights[:, 0, None]
    for j in range(1, weights.shape[1]):
        total = total + rows[:, j] * weights[:, j, None]
    return total.to(ys.dtype)


def grouped_matmul(x: Tensor, w: Tensor, offsets: Tensor, *, transposed: bool = False) -> Tensor:
    ends = offsets.tolist()
    y = x.new_zeros(len(x), w.shape[2 if transposed else 1])
    for e in range(len(w)):
        if ends[e] < ends[e + 1]:
            y[ends[e] : ends[e + 1]] = x[ends[e] : ends[e + 1]] @ (w[e] if transposed else w[e].T)
    return y


def grouped_swiglu(x: Tensor, w_gate: Tensor, w_up: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    g, u = grouped_matmul(x, w_gate, offsets), grouped_matmul(x, w_up, offsets)
    return torch.nn.functional.silu(g) * u, g, u


def swiglu_backward(dh: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    s = g.sigmoid()
    return dh * u * s * (1 + g * (1 - s)), dh * g * s


def grouped_wgrad_(buffer: Tensor, dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    ends = offsets.tolist()
    for e in range(len(buffer)):
        if ends[e] < ends[e + 1]:
            buffer[e] += dy[ends[e] : ends[e + 1]].T @ x[ends[e] : ends[e + 1]]
    return buffer
