"""Which layers a transformer is built of: fast ones, a shard a rank, or exact mode's, several virtual ranks a rank.

The model knows neither: it asks its parts for a norm, an attention, ..., and for the pieces of the parameter table that
this rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.nn import Parameter

from tpengine.config import ModelConfig
from tpengine.layers.attention import Attention
from tpengine.layers.collectives import Communicator
from tpengine.layers.dropout import Dropout
from tpengine.layers.embedding import VocabParallelEmbedding
from tpengine.layers.gradient_sink import GradientSink
from tpengine.layers.linear import ColumnParallelLinear
from tpengine.layers.mlp import SwiGLU
from tpengine.layers.norm import RMSNorm
from tpengine.layers.virtual import (
    VirtualAttention,
    VirtualEmbedding,
    VirtualHead,
    VirtualRanks,
    VirtualRMSNorm,
    VirtualSwiGLU,
)


class Parts(Protocol):
    """Makes the layers of one rank's model.

    Attributes:
        model: sizes.
        tp: the real tp ranks.
        table_size: over how many ranks the parameter table cuts.
        held: those of them that this rank is.
    """

    model: ModelConfig
    tp: Communicator

    @property
    def table_size(self) -> int: ...
    @property
    def held(self) -> range: ...
    def norm(self) -> RMSNorm | VirtualRMSNorm: ...
    def attention(self, dropout: Dropout | None) -> nn.Module: ...
    def mlp(self, dropout: Dropout | None) -> nn.Module: ...
    def embedding(self, num_embeddings: int) -> nn.Module: ...
    def head(self, num_embeddings: int, tied_to: nn.Module | None) -> nn.Module: ...

    def module_name(self, name: str, holder: int) -> str:
        """The name in the model's modules of the shard of parameter `name` that the table's rank `holder` holds."""


class FastParts:
    """The layers that fuse matmuls with their communication; a rank of the table is a real one.

    Args:
        model: sizes.
        tp: the tp ranks.
        replicas: the tp ranks that share a KV head, if kv heads < tp.
        sink, gathers_again, dtype, device: as ColumnParallelLinear.
    """

    def __init__(
        self,
        model: ModelConfig,
        tp: Communicator,
        *,
        replicas: Communicator | None = None,
        sink: GradientSink | None = None,
        gathers_again: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.model, self.tp, self._replicas = model, tp, replicas
        self._sink, self._gathers_again, self._dtype, self._device = sink, gathers_again, dtype, device

    @property
    def table_size(self) -> int:
        """The real tp ranks."""
        return self.tp.size

    @property
    def held(self) -> range:
        """This rank."""
        return range(self.tp.rank, self.tp.rank + 1)

    def norm(self) -> RMSNorm:
        """A norm of x[T/tp, D]."""
        model = self.model
        return RMSNorm(
            model.hidden_size, self.tp, eps=model.norm_eps, sink=self._sink, dtype=self._dtype, device=self._device
        )

    def attention(self, dropout: Dropout | None) -> nn.Module:
        """x[T/tp, D] -> x[T/tp, D]."""
        model = self.model
        return Attention(
            model.hidden_size,
            model.num_heads,
            model.num_kv_heads,
            self.tp,
            replicas=self._replicas,
            rope_theta=model.rope_theta,
            dropout=dropout,
            sink=self._sink,
            gathers_again=self._gathers_again,
            dtype=self._dtype,
            device=self._device,
        )

    def mlp(self, dropout: Dropout | None) -> nn.Module:
        """x[T/tp, D] -> x[T/tp, D]."""
        model = self.model
        return SwiGLU(
            model.hidden_size,
            model.ffn_size,
            self.tp,
            dropout=dropout,
            sink=self._sink,
            gathers_again=self._gathers_again,
            dtype=self._dtype,
            device=self._device,
        )

    def embedding(self, num_embeddings: int) -> nn.Module:
        """tokens[T] -> x[T/tp, D]."""
        return VocabParallelEmbedding(
            num_embeddings, self.model.hidden_size, self.tp, sink=self._sink, dtype=self._dtype, device=self._device
        )

    def head(self, num_embeddings: int, tied_to: nn.Module | None) -> nn.Module:
        """x[T/tp, D] -> logits[T, V/tp]."""
        head = ColumnParallelLinear(
            self.model.hidden_size,
            num_embeddings,
            self.tp,
            sink=self._sink,
            gathers_again=self._gathers_again,
            dtype=self._dtype,
            device=self._device,
        )
        if tied_to is not None:
            assert isinstance(tied_to, VocabParallelEmbedding)
            head.weight = tied_to.weight
        return head

    def module_name(self, name: str, holder: int) -> str:
        """The table's own names are the modules'."""
        return name


class ExactParts:
    """The layers of exact mode.

    Args:
        model: sizes.
        virtual: the virtual ranks.
        sinks: one a held virtual rank.
        head_sinks: those of the output head, which must not add to what a tied embedding's lookup adds to.
        dtype, device: as ColumnParallelLinear.
    """

    def __init__(
        self,
        model: ModelConfig,
        virtual: VirtualRanks,
        *,
        sinks: Sequence[GradientSink] | None = None,
        head_sinks: Sequence[GradientSink] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.model, self.tp, self.virtual = model, virtual.comm, virtual
        self._sinks, self._head_sinks, self._dtype, self._device = sinks, head_sinks, dtype, device

    @property
    def table_size(self) -> int:
        """The virtual ranks."""
        return self.virtual.size

    @property
    def held(self) -> range:
        """The virtual ranks that this one plays."""
        return self.virtual.held

    def norm(self) -> VirtualRMSNorm:
        """As FastParts.norm."""
        model = self.model
        return VirtualRMSNorm(
            model.hidden_size,
            self.virtual,
            eps=model.norm_eps,
            sinks=self._sinks,
            dtype=self._dtype,
            device=self._device,
        )

    def attention(self, dropout: Dropout | None) -> nn.Module:
        """As FastParts.attention."""
        model = self.model
        return VirtualAttention(
            model.hidden_size,
            model.num_heads,
            model.num_kv_heads,
            self.virtual,
            rope_theta=model.rope_theta,
            dropout=dropout,
            sinks=self._sinks,
            dtype=self._dtype,
            device=self._device,
        )

    def mlp(self, dropout: Dropout | None) -> nn.Module:
        """As FastParts.mlp."""
        return VirtualSwiGLU(
            self.model.hidden_size,
            self.model.ffn_size,
            self.virtual,
            dropout=dropout,
            sinks=self._sinks,
            dtype=self._dtype,
            device=self._device,
        )

    def embedding(self, num_embeddings: int) -> nn.Module:
        """As FastParts.embedding."""
        return VirtualEmbedding(
            num_embeddings,
            self.model.hidden_size,
            self.virtual,
            sinks=self._sinks,
            dtype=self._dtype,
            device=self._device,
        )

    def head(self, num_embeddings: int, tied_to: nn.Module | None) -> nn.Module:
        """x[T/tp, D] -> logits[n, T, V/(n tp)]."""
        weights: Sequence[Parameter] | None = None
        if tied_to is not None:
            assert isinstance(tied_to, VirtualEmbedding)
            weights = tied_to.weights
        return VirtualHead(
            self.model.hidden_size,
            num_embeddings,
            self.virtual,
            weights=weights,
            sinks=self._head_sinks,
            dtype=self._dtype,
            device=self._device,
        )

    def module_name(self, name: str, holder: int) -> str:
        """A shard is held under its first virtual rank here: layers.0.mlp.shards.5.up_proj.weight."""
        *path, module, weight = name.split(".")
        if module.endswith("norm"):
            return name
        shard = ["shards", str(max(holder, self.held.start))]
        within = [module] if path else []
        owner = path or [module]
        return ".".join([*owner, *shard, *within, weight])
