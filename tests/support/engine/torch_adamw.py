"""Updates as a run makes them, by hand: torch's AdamW, decay of matrices alone, clipping, the rate of each step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tpengine.config import Config
from tpengine.training.learning_rate import learning_rate


class TorchAdamW:
    """Trains weights of one process.

    Args:
        weights: all of them, each once.
        config: of the run.
    """

    def __init__(self, weights: Iterable[Tensor], config: Config) -> None:
        self._weights, self._config = list(weights), config
        optim = config.optim
        decayed, others = ([w for w in self._weights if (w.dim() > 1) == decays] for decays in (True, False))
        groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.eps)

    def update(self, loss: Tensor, step: int) -> float:
        """Update the weights by the gradients of a step's loss; return their norm before clipping."""
        optim = self._config.optim
        self._adamw.zero_grad()
        loss.backward()
        # torch's clip_grad_norm_ adds 1e-6 to the norm.
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_(optim.clip_norm / norm.clamp_min(optim.clip_norm))
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate(optim, step, self._config.train.steps)
        self._adamw.step()
        return norm.item()
