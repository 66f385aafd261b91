"""Dropout whose mask follows from place, step and micro-batch, not from a generator: the same in every layout.

A model holds one `Position`. The training loop writes into it which micro-batch of which step comes next. Each place of
the model that drops elements has its own `Dropout`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from tpkernels.ops.attention.host import AttentionDropout
from tpkernels.ops.dropout import DropoutStream, dropout

from tpengine.config import ModelConfig
from tpengine.layers.rows import Documents


@dataclass
class Position:
    """Step and micro-batch that are computed next.

    Attributes:
        step, microbatch: 0-based; micro-batches are counted over all replicas.
        training: False while nothing is dropped: in held-out loss and sampling.
        documents: those packed into the micro-batch; None where sequences are whole.
    """

    step: int = 0
    microbatch: int = 0
    training: bool = False
    documents: Documents | None = None


class Dropout:
    """Dropout at one place of a model.

    Args:
        rate: share of elements that are dropped, 0 <= rate < 1.
        seed: the run's seed.
        site: name of the place, unique in the model.
        position: what is computed next; every forward reads it.
    """

    def __init__(self, rate: float, seed: int, site: str, position: Position) -> None:
        self._rate, self._seed, self._site, self._position = rate, seed, site, position

    def __call__(self, x: Tensor, first_row: int, first_column: int, row_length: int) -> Tensor:
        """Drop elements of x[rows, columns], a block of the global matrix [T, row_length]; scale up the others."""
        stream = self._stream()
        return x if stream is None else dropout(x, stream, first_row, first_column, row_length)

    def of_heads(self, first_head: int, num_heads: int) -> AttentionDropout | None:
        """Return the dropout of attention probabilities for heads from `first_head` on, of `num_heads` in all."""
        stream = self._stream()
        return None if stream is None else AttentionDropout(stream, first_head, num_heads)

    def _stream(self) -> DropoutStream | None:
        at = self._position
        if not self._rate or not at.training:
            return None
        return DropoutStream(self._rate, self._seed, self._site, at.step, at.microbatch)


@dataclass(frozen=True)
class LayerDropouts:
    """The dropouts of one transformer block."""

    attention: Dropout
    attention_residual: Dropout
    mlp: Dropout
    mlp_residual: Dropout

    @classmethod
    def of(cls, model: ModelConfig, seed: int, layer: int, position: Position) -> LayerDropouts:
        """Return the dropouts of layer number `layer`."""

        def at(rate: float, site: str) -> Dropout:
            return Dropout(rate, seed, f"layers.{layer}.{site}", position)

        return cls(
            attention=at(model.attention_dropout, "self_attn"),
            attention_residual=at(model.residual_dropout, "self_attn.residual"),
            mlp=at(model.mlp_dropout, "mlp"),
            mlp_residual=at(model.residual_dropout, "mlp.residual"),
        )
