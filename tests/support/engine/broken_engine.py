"""What certify's ranks make where a test breaks the engine on purpose; named by text, as local_ranks needs it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tpengine.commands.certify_witness import Gradients, Witness
from tpengine.config import Config


class LateWitness(Witness):
    """Spoils the last bit of one weight of the last rank from the second step on; leaves a single process alone."""

    def step(self, step: int) -> Any:
        seen = super().step(step)
        if step == 0 and 0 < dist.get_rank() == dist.get_world_size() - 1:
            block: Any = self.trainer.state.model.layers["1"]
            weight = block.mlp.shards["7"].up_proj.weight
            weight.data.view(torch.int32)[0, 0].bitwise_xor_(1)
        return seen


class FailingWitness(Witness):
    """Raises in its first step."""

    def step(self, step: int) -> Any:
        raise RuntimeError("planted")


class WrongGradients(Gradients):
    """Makes one norm's gradient wrong by a ten-thousandth on every rank, if there are several."""

    def __init__(self, config: Config, weights_in: str) -> None:
        super().__init__(config, weights_in)
        if dist.get_world_size() > 1:
            self.spoil()

    def spoil(self) -> None:
        gradients: Any = self.trainer.state.gradients
        gradient, finish = gradients.of["layers.3.input_layernorm.weight"], gradients.finish

        def spoilt() -> None:
            gradient.mul_(1 + 1e-4)
            finish()

        gradients.finish = spoilt


class StaleReplica(WrongGradients):
    """Does what WrongGradients does, but on rank 0 only."""

    def spoil(self) -> None:
        if dist.get_rank() == 0:
            super().spoil()
