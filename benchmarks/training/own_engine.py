"""tpengine as a contestant: its trainer, built as in runs/loop.py, without checkpoints, metrics and watch."""

from __future__ import annotations

import torch

# As in tpengine.distributed.process: imported after the process group exists, it would keep that group alive.
import torch.distributed.nn.functional
from torch import Tensor

from tpengine.config import Config
from tpengine.data import Corpus
from tpengine.runs.trainer import Trainer


class OwnEngine:
    """One rank of a tpengine run; the default process group must exist.

    Args:
        config: validated, layout resolved, on the CPU.
        corpus: the text.
    """

    def __init__(self, config: Config, corpus: Corpus) -> None:
        self._trainer = Trainer(config, corpus, torch.device("cpu"))

    def train_step(self, step: int) -> tuple[float, float]:
        """Run one step; return loss and gradient norm."""
        result = self._trainer.step.run(step)
        return result.loss, result.grad_norm

    def parameters(self) -> dict[str, Tensor]:
        """Return this rank's parameters; the tensors themselves."""
        return {name: parameter.detach() for name, parameter in self._trainer.state.model.named_parameters()}
