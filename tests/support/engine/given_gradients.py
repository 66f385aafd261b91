"""Gradients that are given, a small model for them, and which parameters of two models differ."""

from __future__ import annotations

import torch
from torch import nn


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        if parameter.requires_grad:
            grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = torch.empty_like(parameter.detach()).copy_(grad)


def differing(mine: nn.Module, wanted: nn.Module) -> list[str]:
    """Names of parameters that are not equal in every bit."""
    return [
        name
        for (name, p), (_, q) in zip(mine.named_parameters(), wanted.named_parameters(), strict=True)
        if not torch.equal(p, q)
    ]


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 60), nn.Linear(60, 2))
