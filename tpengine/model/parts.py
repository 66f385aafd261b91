"""Which layers a transformer is built of: one over all tp ranks, or in exact mode the same one over each shard.

The model knows neither: it asks its parts for a norm, an attention, ..., and for the pieces of the parameter table that
this rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from tpengine.config import ModelConfig
from tpengine.layers.attention import Attention
from tpengine.layers.collectives import Communicator
from tpengine.layers.dropout import Dropout
from tpengine.layers.embedding import VocabParallelEmbedding
from tpengine.layers.gradient_sink import GradientSink
from tpengine.layers.linear import ColumnParallelLinear
from tpengine.layers.mlp import SwiGLU
from tpengine.layers.norm import RMSNorm
from tpengine.model.exact import ExactLayer, ExactMatmuls, ExactNorm, Shards, collect, stacked, whole


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
    def norm(self) -> RMSNorm | ExactNorm: ...
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
    """The layers of exact mode: those of FastParts, over one shard each.

    Args:
        model: sizes.
        shards: all V shards, and which of them this rank holds.
        sinks: one per held shard.
        head_sinks: those of the output head, which must not add to what a tied embedding's lookup adds to.
        dtype, device: as ColumnParallelLinear.
    """

    def __init__(
        self,
        model: ModelConfig,
        shards: Shards,
        *,
        sinks: Sequence[GradientSink] | None = None,
        head_sinks: Sequence[GradientSink] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.model, self.tp, self.shards = model, shards.comm, shards

        def of_each(sinks: Sequence[GradientSink] | None) -> list[FastParts]:
            sink_of: Sequence[GradientSink | None] = sinks or [None] * len(shards.held)
            return [
                FastParts(
                    model,
                    shards.ranks_of(shard),
                    replicas=shards.replicas_of(shard, model.num_kv_heads),
                    sink=sink,
                    dtype=dtype,
                    device=device,
                )
                for shard, sink in zip(shards.held, sink_of, strict=True)
            ]

        self._each, self._each_head, self._has_sinks = of_each(sinks), of_each(head_sinks), sinks is not None

    @property
    def table_size(self) -> int:
        """The shards."""
        return self.shards.size

    @property
    def held(self) -> range:
        """The shards that this rank holds."""
        return self.shards.held

    def norm(self) -> ExactNorm:
        """See FastParts.norm."""
        return ExactNorm(self.shards, [parts.norm() for parts in self._each])

    def attention(self, dropout: Dropout | None) -> nn.Module:
        """As FastParts.attention.

        Raises:
            ValueError: no sinks, and ranks share a KV head, each with a part of its gradient.
        """
        num_kv_heads, num_ranks = self.model.num_kv_heads, self.tp.size
        if not self._has_sinks and num_kv_heads < num_ranks:
            raise ValueError(
                f"num_kv_heads must be at least tp unless sinks sum over the ranks that share a head: num_kv_heads "
                f"{num_kv_heads}, tp {num_ranks}: pass sinks"
            )
        return ExactMatmuls(self.shards, [parts.attention(dropout) for parts in self._each], collect)

    def mlp(self, dropout: Dropout | None) -> nn.Module:
        """See FastParts.mlp."""
        return ExactMatmuls(self.shards, [parts.mlp(dropout) for parts in self._each], collect)

    def embedding(self, num_embeddings: int) -> nn.Module:
        """See FastParts.embedding."""
        return ExactLayer(self.shards, [parts.embedding(num_embeddings) for parts in self._each], whole, collect)

    def head(self, num_embeddings: int, tied_to: nn.Module | None) -> nn.Module:
        """x[T/tp, D] -> logits[n, T, V/(n tp)]."""
        tables: Sequence[nn.Module | None] = [None] * len(self._each_head)
        if tied_to is not None:
            assert isinstance(tied_to, ExactLayer)
            tables = list(tied_to.shards.values())
        heads = [parts.head(num_embeddings, table) for parts, table in zip(self._each_head, tables, strict=True)]
        return ExactMatmuls(self.shards, heads, stacked)

    def module_name(self, name: str, holder: int) -> str:
        """Return the name of a piece in its first shard here: layers.0.mlp.shards.5.up_proj.weight."""
        path = name.split(".")
        layer = 3 if path[0] == "layers" else 1
        return ".".join([*path[:layer], "shards", str(max(holder, self.held.start)), *path[layer:]])
