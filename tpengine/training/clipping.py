"""Clipping by the global norm, in place: for optimizers that do not multiply gradients as they read them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def clip_(gradients: Iterable[Tensor], norm: Tensor, max_norm: float, loss_scale: float = 1.0) -> None:
    """Divide all gradients by the loss scale and multiply them by min(1, max_norm / norm), in place.

    Args:
        norm: of the gradients, divided by the loss scale.
        max_norm: 0 does not clip.
        loss_scale: that they were computed with, a power of two.

    No host synchronisation.
    """
    if max_norm == 0 and loss_scale == 1.0:
        return
    scale = torch.ones_like(norm) if max_norm == 0 else max_norm / norm.clamp_min(max_norm)
    scale = scale / loss_scale
    by_dtype: dict[torch.dtype, Tensor] = {}
    for gradient in gradients:
        gradient.mul_(by_dtype.setdefault(gradient.dtype, scale.to(gradient.dtype)))
