"""The layer of squared.py, as fast mode has it."""

from __future__ import annotations

from torch import Tensor, nn

from support.architectures.squared import Squared
from tpengine.layers import ColumnParallelLinear, RowParallelLinear
from tpengine.layers.dropout import Dropout
from tpengine.model.parts import FastParts


class SquaredLayer(nn.Module):
    """x[T/tp, D] -> y[T/tp, D]."""

    def __init__(self, parts: FastParts) -> None:
        super().__init__()
        model, options = parts.model, dict(parts.options, gathers_again=parts.gathers_again)
        self.up = ColumnParallelLinear(model.hidden_size, model.ffn_size, parts.tp, **options)
        self.down = RowParallelLinear(model.ffn_size, model.hidden_size, parts.tp, bias=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu().square())
        return y

    def prepare(self, num_tokens: int) -> None:
        """See ColumnParallelLinear.prepare."""
        self.up.prepare(num_tokens)
        self.down.prepare(num_tokens)

    def release(self) -> None:
        """See ColumnParallelLinear.release."""
        self.up.release()
        self.down.release()


def squared(part: Squared, parts: FastParts, dropout: Dropout | None) -> SquaredLayer:
    """Make the layer: what Squared.layer names."""
    return SquaredLayer(parts)
