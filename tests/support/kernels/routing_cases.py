"""Routings to test with: logits that spread tokens evenly, skewed, onto one expert, onto every other one, and that tie.

Used by tests/kernels/ops/experts/.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _noise(tokens: int, experts: int, seed: int) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _zipf(tokens: int, experts: int, seed: int) -> Tensor:
    return _noise(tokens, experts, seed) / 2 - 2 * torch.arange(1, experts + 1, dtype=torch.float64).log()


def _one_expert(tokens: int, experts: int, seed: int) -> Tensor:
    logits = _noise(tokens, experts, seed)
    logits[:, experts // 2] += 20
    return logits


def _alternating(tokens: int, experts: int, seed: int) -> Tensor:
    """Every other expert is empty as long as k allows."""
    logits = _noise(tokens, experts, seed)
    logits[:, 1::2] -= 20
    return logits


def _tied(tokens: int, experts: int, seed: int) -> Tensor:
    return _noise(tokens, experts, seed).round()


# By name: (tokens, experts, seed) -> logits[T, E] in float64.
ROUTINGS: dict[str, Callable[[int, int, int], Tensor]] = {
    "uniform": _noise,
    "zipf": _zipf,
    "one expert": _one_expert,
    "alternating": _alternating,
    "tied": _tied,
}


def drawn_experts(routing: str, tokens: int, experts: int, k: int, seed: int) -> Tensor:
    """The experts int32 [T, k] of a routing."""
    return ROUTINGS[routing](tokens, experts, seed).sort(dim=1, descending=True, stable=True).indices[:, :k].int()
