"""Which layers a transformer is built of: one over all tp ranks, or in exact mode the same one over each shard.

The model knows neither: it asks its parts for the layer of each part of the architecture (a norm, an attention, ...),
and for the pieces of the parameter table that this rank holds.
"""

from __future__ import annotations

import functools
import math
import pkgutil
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from tpkernels.exchange.communicator import Communicator
from tpkernels.ops.attention.choice import Whose
from tpkernels.ops.experts.choose import ChoiceRule
from tpkernels.ops.rope_tables import LinearScaling, Llama3Scaling, LongRopeScaling, RopeScaling, YarnScaling

from tpengine.architectures import describe
from tpengine.config import ModelConfig
from tpengine.layers.attention import Attention
from tpengine.layers.bias import LearnedPositions
from tpengine.layers.chunked_experts import ChunkedExperts
from tpengine.layers.column import ColumnParallelLinear
from tpengine.layers.dropout import Dropout
from tpengine.layers.experts import ExpertNetworks, MixtureOfExperts
from tpengine.layers.gradient_sink import GradientSink
from tpengine.layers.mlp import FeedForward
from tpengine.layers.norm import LayerNorm, Norm, OffsetRMSNorm, RMSNorm
from tpengine.layers.query_scaling import QueryScaling
from tpengine.layers.row_buffers import RowBuffers
from tpengine.layers.scores import Rotation, Scores
from tpengine.layers.spread_experts import SpreadExperts
from tpengine.layers.vocabulary import VocabParallelEmbedding
from tpengine.layers.width_norm import WidthNorm
from tpengine.layout.parameters import Piece
from tpengine.model.exact import (
    ExactExperts,
    ExactLayer,
    ExactMatmuls,
    ExactNorm,
    ExactPositions,
    ExactWidthNormed,
    Shards,
    collect,
    stacked,
    whole,
)


class Parts(Protocol):
    """Makes the layers of one rank's model.

    Attributes:
        model: sizes.
        tp: the real tp ranks.
        table_size: over how many ranks the parameter table cuts.
        held: those of them that this rank is.
        experts_comm: the ranks that share experts (parallel.ep); None where each expert is cut over tp.
        row_buffers: for the rows of this rank's experts, if kernels move them; else None.
        is_exact: whether it makes exact mode's layers.
    """

    model: ModelConfig
    tp: Communicator
    experts_comm: Communicator | None
    row_buffers: RowBuffers | None
    is_exact: bool

    @property
    def table_size(self) -> int: ...
    @property
    def held(self) -> range: ...
    def layer(self, part: describe.Part, dropout: Dropout | None = None) -> Any: ...
    def embedding(self, num_embeddings: int) -> nn.Module: ...
    def positions(self) -> LearnedPositions | ExactPositions: ...
    def head(self, num_embeddings: int, tied_to: nn.Module | None) -> nn.Module: ...

    def module_name(self, piece: Piece) -> str:
        """The name in the model's modules of a piece of the parameter table."""


_NORMS = {"rms": RMSNorm, "rms_offset": OffsetRMSNorm, "layer": LayerNorm}


def scores_of(part: describe.Attention, model: ModelConfig) -> Scores:
    """Return how a part's scores are made, with the model's rotary frequencies unless it has its own."""
    rotation = Rotation(part.rope_theta) if part.rope_theta else rotation_of(model)
    grows = QueryScaling(part.query_beta, part.query_length) if part.query_beta else None
    return Scores(rotation if part.rotates else None, part.window or None, part.scale or None, grows)


def rotation_of(model: ModelConfig) -> Rotation:
    """Return a model's rotary frequencies, with their scaling, and how much of a head they rotate.

    Of longrope the long factors are taken in sequences of more than original_max_position_embeddings tokens, the short
    ones in others. A sequence has the length that the run is set to (train.seq_len), also where it holds packed
    documents, and where text is made the length to which it may grow. transformers asks for the furthest position of
    each pass, which is the same unless a longer sequence was allowed than came.
    """
    rope, size = model.details.rope, None if model.rotary_size == model.head_size else model.rotary_size
    if rope.rope_type != "longrope":
        return Rotation(model.rope_theta, _scaling_of(model), size)
    original = rope.original_max_position_embeddings
    grown = math.sqrt(1 + math.log(rope.factor) / math.log(original)) if rope.factor > 1 else 1.0
    short, long = (
        LongRopeScaling(factors, rope.attention_factor or grown) for factors in (rope.short_factor, rope.long_factor)
    )
    return Rotation(model.rope_theta, short, size, (original, long))


def _scaling_of(model: ModelConfig) -> RopeScaling | None:
    """Return the scaling of a model's rotary frequencies, where it is one for all lengths."""
    rope = model.details.rope
    match rope.rope_type:
        case "linear":
            return LinearScaling(rope.factor)
        case "llama3":
            length = rope.original_max_position_embeddings
            return Llama3Scaling(rope.factor, rope.low_freq_factor, rope.high_freq_factor, length)
        case "yarn":
            return YarnScaling(
                model.rope_theta,
                rope.factor,
                rope.original_max_position_embeddings,
                rope.beta_fast,
                rope.beta_slow,
                rope.attention_factor or None,
                rope.truncate,
            )
    return None


class FastParts:
    """The layers that fuse matmuls with their communication; a rank of the table is a real one.

    Args:
        model: sizes.
        tp: the tp ranks.
        replicas: the tp ranks that share a KV head, if kv heads < tp.
        experts_comm: the ranks that share experts; None where each expert is cut over tp.
        row_buffers: as SpreadExperts.
        attention: whose attention the layers take, as layers.Attention's `whose`.
        sink, gathers_again, dtype, device: as ColumnParallelLinear.
    """

    def __init__(
        self,
        model: ModelConfig,
        tp: Communicator,
        *,
        replicas: Communicator | None = None,
        experts_comm: Communicator | None = None,
        row_buffers: RowBuffers | None = None,
        attention: Whose = "auto",
        sink: GradientSink | None = None,
        gathers_again: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.model, self.tp, self.replicas, self.whose = model, tp, replicas, attention
        self.is_exact = False
        self.experts_comm, self.row_buffers = experts_comm, row_buffers
        # What every layer with weights takes.
        self.options: dict[str, Any] = dict(sink=sink, dtype=dtype, device=device)
        self.gathers_again = gathers_again

    @property
    def table_size(self) -> int:
        """The real tp ranks."""
        return self.tp.size

    @property
    def held(self) -> range:
        """This rank."""
        return range(self.tp.rank, self.tp.rank + 1)

    def layer(self, part: describe.Part, dropout: Dropout | None = None) -> Any:
        """The layer of a part, x[T/tp, D] -> x[T/tp, D], made by what the part names.

        Args:
            part: of the architecture.
            dropout: inside it.
        """
        return pkgutil.resolve_name(part.layer)(part, self, dropout)

    def embedding(self, num_embeddings: int) -> nn.Module:
        """tokens[T] -> x[T/tp, D]."""
        return VocabParallelEmbedding(num_embeddings, self.model.hidden_size, self.tp, **self.options)

    def positions(self) -> LearnedPositions:
        """x[T/tp, D] -> x[T/tp, D]."""
        num, size = self.model.details.max_positions, self.model.hidden_size
        return LearnedPositions(num, size, self.tp, **self.options)

    def head(self, num_embeddings: int, tied_to: nn.Module | None) -> nn.Module:
        """x[T/tp, D] -> logits[T, V/tp]."""
        head = ColumnParallelLinear(
            self.model.hidden_size,
            num_embeddings,
            self.tp,
            gathers_again=self.gathers_again,
            **self.options,
        )
        if tied_to is not None:
            assert isinstance(tied_to, VocabParallelEmbedding)
            head.weight = tied_to.weight
        return head

    def module_name(self, piece: Piece) -> str:
        """The table's own names are the modules'."""
        return piece.spec.name


class ExactParts:
    """The layers of exact mode: those of FastParts, over one shard each.

    Args:
        model: sizes.
        shards: all V shards, and which of them this rank holds.
        experts_comm: the ranks that share experts; None where each expert is cut over tp.
        sinks: one per held shard.
        expert_sinks: of experts that ranks share, for each replica among these ranks one per shard.
        head_sinks: those of the output head, which must not add to what a tied embedding's lookup adds to.
        dtype, device: as ColumnParallelLinear.
    """

    def __init__(
        self,
        model: ModelConfig,
        shards: Shards,
        *,
        experts_comm: Communicator | None = None,
        sinks: Sequence[GradientSink] | None = None,
        expert_sinks: Sequence[Sequence[GradientSink]] | None = None,
        head_sinks: Sequence[GradientSink] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.model, self.tp, self.shards, self.is_exact = model, shards.comm, shards, True
        self.experts_comm, self.expert_sinks = experts_comm, expert_sinks
        self.row_buffers: RowBuffers | None = None
        self.options: dict[str, Any] = dict(dtype=dtype, device=device)

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

        self.each, self._each_head, self.has_sinks = of_each(sinks), of_each(head_sinks), sinks is not None

    @property
    def table_size(self) -> int:
        """The shards."""
        return self.shards.size

    @property
    def held(self) -> range:
        """The shards that this rank holds."""
        return self.shards.held

    def layer(self, part: describe.Part, dropout: Dropout | None = None) -> Any:
        """See FastParts.layer: the exact form, of one such layer a shard."""
        return pkgutil.resolve_name(part.exact_layer)(part, self, dropout)

    def embedding(self, num_embeddings: int) -> nn.Module:
        """See FastParts.embedding."""
        return ExactLayer(self.shards, [parts.embedding(num_embeddings) for parts in self.each], whole, collect)

    def positions(self) -> ExactPositions:
        """See FastParts.positions."""
        return ExactPositions(self.shards, [parts.positions() for parts in self.each])

    def head(self, num_embeddings: int, tied_to: nn.Module | None) -> nn.Module:
        """x[T/tp, D] -> logits[n, T, V/(n tp)]."""
        tables: Sequence[nn.Module | None] = [None] * len(self._each_head)
        if tied_to is not None:
            assert isinstance(tied_to, ExactLayer)
            tables = list(tied_to.shards.values())
        heads = [parts.head(num_embeddings, table) for parts, table in zip(self._each_head, tables, strict=True)]
        return ExactMatmuls(self.shards, heads, stacked)

    def module_name(self, piece: Piece) -> str:
        """Return the name of a piece in its first shard here: layers.0.mlp.shards.5.up_proj.weight.

        Of experts that ranks share: layers.0.mlp.chunks.5.up_proj.weight.
        """
        path = piece.spec.name.split(".")
        layer = 3 if path[0] == "layers" else 1
        if piece.spec.apart:
            return ".".join([*path[:layer], "chunks", str(piece.holder), *path[layer + 1 :]])
        return ".".join([*path[:layer], "shards", str(max(piece.holder, self.held.start)), *path[layer:]])


# What parts name as what makes their layers, and their exact forms.


def norm(part: describe.Norm, parts: FastParts, dropout: Dropout | None = None) -> Norm:
    """A norm of x[T/tp, D]."""
    return _norm_over(part, parts, parts.model.hidden_size, parts.tp)


def _norm_over(part: describe.Norm, parts: FastParts, size: int, comm: Communicator) -> Norm:
    made: Norm = _NORMS[part.kind](size, comm, eps=parts.model.norm_eps, **parts.options)
    return made


def _width_norm(parts: FastParts, size: int, replicas: Communicator | None) -> WidthNorm:
    return WidthNorm(size, parts.tp, eps=parts.model.norm_eps, replicas=replicas, **parts.options)


def attention(part: describe.Attention, parts: FastParts, dropout: Dropout | None) -> nn.Module:
    """x[T/tp, D] -> x[T/tp, D]."""
    model = parts.model
    return Attention(
        model.hidden_size,
        model.num_heads,
        model.num_kv_heads,
        parts.tp,
        head_size=model.head_size,
        qkv_bias=part.qkv_bias,
        output_bias=part.output_bias,
        head_norm=functools.partial(_norm_over, part.head_norm, parts) if part.head_norm else None,
        width_norm=functools.partial(_width_norm, parts) if part.norms_width else None,
        scores=scores_of(part, model),
        replicas=parts.replicas,
        dropout=dropout,
        whose=parts.whose,
        gathers_again=parts.gathers_again,
        **parts.options,
    )


def feed_forward(part: describe.FeedForward, parts: FastParts, dropout: Dropout | None) -> nn.Module:
    """x[T/tp, D] -> x[T/tp, D]."""
    model = parts.model
    return FeedForward(
        model.hidden_size,
        model.ffn_size,
        parts.tp,
        activation=part.activation,
        gated=part.gated,
        bias=part.bias,
        dropout=dropout,
        gathers_again=parts.gathers_again,
        **parts.options,
    )


def experts(part: describe.Experts, parts: FastParts, dropout: Dropout | None) -> nn.Module:
    """x[T/tp, D] -> x[T/tp, D]; nothing is dropped inside (config/rules.py)."""
    sizes = parts.model.hidden_size, part.ffn_size, part.num_experts
    if parts.experts_comm is not None:
        options = dict(_mixture_options(part, parts), row_buffers=parts.row_buffers)
        return SpreadExperts(*sizes, _rule_of(part), parts.tp, parts.experts_comm, **options)
    return MixtureOfExperts(*sizes, _rule_of(part), parts.tp, **_mixture_options(part, parts))


def _rule_of(part: describe.Experts) -> ChoiceRule:
    return ChoiceRule(part.top_k, part.scoring, part.normalize, part.scale, part.num_groups, part.top_groups)


def _mixture_options(part: describe.Experts, parts: FastParts) -> dict[str, Any]:
    return dict(
        has_bias=part.has_bias,
        shared_size=part.shared_size,
        shared_gated=part.shared_gated,
        gathers_again=parts.gathers_again,
        **parts.options,
    )


def exact_experts(part: describe.Experts, parts: ExactParts, dropout: Dropout | None) -> nn.Module:
    """As experts: each expert cut over the shards; where ranks share them, all chunks of whole ones on one rank."""
    comm, shards = parts.experts_comm, parts.shards
    if comm is None:
        return exact_products(part, parts, dropout)
    hidden, num_own = parts.model.hidden_size, part.num_experts // comm.size
    layers = [
        MixtureOfExperts(
            hidden, part.ffn_size, part.num_experts, _rule_of(part), each.tp, apart=True, **_mixture_options(part, each)
        )
        for each in parts.each
    ]
    chunks = {
        str(shard): ExpertNetworks(hidden, part.ffn_size, num_own, shards.ranks_of(shard), **parts.options)
        for shard in range(shards.size)
    }
    return ExactExperts(shards, layers, ChunkedExperts(chunks, shards.comm, comm, parts.expert_sinks))


def exact_norm(part: describe.Norm, parts: ExactParts, dropout: Dropout | None = None) -> ExactNorm:
    """See norm."""
    return ExactNorm(parts.shards, [each.layer(part) for each in parts.each])


def exact_attention(part: describe.Attention, parts: ExactParts, dropout: Dropout | None) -> nn.Module:
    """As attention.

    Raises:
        ValueError: no sinks, and ranks share a KV head, each with a part of its gradient.
    """
    num_kv_heads, num_ranks = parts.model.num_kv_heads, parts.tp.size
    if not parts.has_sinks and num_kv_heads < num_ranks:
        raise ValueError(
            f"num_kv_heads must be at least tp unless sinks sum over the ranks that share a head: num_kv_heads "
            f"{num_kv_heads}, tp {num_ranks}: pass sinks"
        )
    if part.norms_width:
        return ExactWidthNormed(parts.shards, [each.layer(part, dropout) for each in parts.each], collect)
    return exact_products(part, parts, dropout)


def exact_products(part: describe.Part, parts: ExactParts, dropout: Dropout | None) -> nn.Module:
    """The exact form of any layer that multiplies all tokens by weights and adds up what the ranks have of y."""
    return ExactMatmuls(parts.shards, [each.layer(part, dropout) for each in parts.each], collect)
