"""Exact mode: the ordinary layers, each over one of V fixed shards, so that no layout changes a bit.

    spread:    x[T/tp, D] -> X[T, D], once for each held shard;   dx = reduce_scatter of their dX, in a balanced tree
    collect:   partial y_v[T, D] of each shard v -> y[T/tp, D], added in a balanced tree;   dy_v = all_gather(dy)

A rank holds V/tp shards and computes one after the other. Between spread and collect, an ordinary layer does what rank
v of tp = V would do, in shapes that follow from V and T. So no operation's shape, stride or alignment depends on tp,
and neither do its bits. The trees (exchange/tree.py) do not depend on tp either. Elementwise additions and products of
activations need no such care: their results do not depend on shapes.

The decision a reader will question: a layer does not know that it computes a shard. It is made over a ShardCommunicator
of V ranks, whose gather and reduce-scatter return their input; spread and collect do the exchange. So whatever is added
to an ordinary layer works in exact mode too. A norm needs no matmul: the blocks of all held shards are one call.

The price: gathers and sums do not overlap with matmuls. Partial sums travel in at least float32. Each matmul has a
V/tp-th of the fast one's size. With fewer KV heads than shards, K and V are computed for each shard. A rank looks up
all tokens V/tp times and adds the V/tp results [T, D], though each row is non-zero in at most one of them.

Sources: TBIK (arXiv 2511.17826) makes the forward passes of any tp agree, by one binary tree within a GPU and between
GPUs. EasyScale (SC 2023) runs a fixed number of data-parallel workers on any number of GPUs. This module combines both,
and extends them to backward, pipelines, dropout and the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.derivatives import differentiable_once
from tpkernels.exchange.communicator import Communicator

from tpengine.layers.bias import LearnedPositions
from tpengine.layers.chunked_experts import ChunkedExperts
from tpengine.layers.collectives import ShardCommunicator
from tpengine.layers.column import ColumnParallelLinear
from tpengine.layers.experts import MixtureOfExperts
from tpengine.layers.norm import Norm
from tpengine.layers.placement import SaysPlacements, check_tokens
from tpengine.layers.prepared_weights import Contents
from tpengine.layers.row import RowParallelLinear
from tpengine.layers.rows import Rows
from tpengine.layers.whereabouts import Placed
from tpengine.layers.width_norm import WidthNorm, norm_over_ranks
from tpengine.layout.parameters import ALIGNMENT_BYTES


@dataclass(frozen=True)
class Shards:
    """The V shards of exact mode, and those that this rank holds.

    Attributes:
        comm: the real tp ranks; their number divides `size`.
        size: V, a power of two.

    Raises:
        ValueError: V is not a power of two, or not divisible by the number of real ranks.
    """

    comm: Communicator
    size: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.size & (self.size - 1) or self.size % self.comm.size:
            raise ValueError(
                f"shards must be a power of two that the tp ranks divide: {self.size} shards, tp {self.comm.size}: "
                "use 8 on 1, 2, 4 or 8 ranks"
            )

    @property
    def held(self) -> range:
        """The shards that this rank computes."""
        each = self.size // self.comm.size
        return range(self.comm.rank * each, (self.comm.rank + 1) * each)

    def ranks_of(self, shard: int) -> ShardCommunicator:
        """Return the communicator that the layers of a shard are made over."""
        return ShardCommunicator(shard, self.size, self.comm)

    def replicas_of(self, shard: int, num_kv_heads: int) -> ShardCommunicator | None:
        """Return the communicator of the shards that share this one's KV head; None if each has its own."""
        num = self.size // num_kv_heads
        return ShardCommunicator(shard % num, num, Communicator(None)) if num > 1 else None


class _Spread(torch.autograd.Function):
    """x[T/tp, D] -> X[T, D] for each held shard;  dx = tree_reduce_scatter(dX_v)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards) -> tuple[Tensor, ...]:
        ctx.comm, ctx.dtype = shards.comm, x.dtype
        full = _aligned(shards.comm.all_gather(x))
        return tuple(full.view_as(full) for _ in shards.held)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.reduce_scatter_in_tree(grads).to(ctx.dtype), None


class _Collect(torch.autograd.Function):
    """y_v[T, D] of each held shard -> y[T/tp, D] = tree_reduce_scatter(y_v);  dy_v = all_gather(dy)."""

    @staticmethod
    def forward(ctx: Any, shards: Shards, *partials: Tensor) -> Tensor:
        ctx.comm, ctx.num = shards.comm, len(partials)
        return shards.comm.reduce_scatter_in_tree(partials).to(partials[0].dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        full = _aligned(ctx.comm.all_gather(dy.contiguous()))
        return (None,) + (full,) * ctx.num


class _Stack(torch.autograd.Function):
    """y_v[T, C] of each of the n held shards -> y[n, T, C];  dy_v = dy[v], each aligned as a tensor of its own is."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        return torch.stack(outputs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        return tuple(_aligned(of_shard) for of_shard in dy)


def _aligned(x: Tensor) -> Tensor:
    """Return x contiguous and aligned to a cache line: with another alignment a library may add in another order."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT_BYTES else x


def spread(x: Tensor, shards: Shards) -> tuple[Tensor, ...]:
    """Give every held shard all tokens: X_v[T, D] = all_gather(x[T/tp, D]). Their gradients are added in a tree."""
    return _Spread.apply(x, shards)


def whole(x: Tensor, shards: Shards) -> tuple[Tensor, ...]:
    """Give every held shard x[T, ...] as it is: every rank holds all tokens already."""
    check_tokens(len(x), shards.size, "shards")
    return (x,) * len(shards.held)


def collect(partials: Sequence[Tensor], shards: Shards) -> Tensor:
    """Add the shards' partial tensors in a tree and keep this rank's tokens: y[T/tp, D] from y_v[T, D]."""
    y: Tensor = _Collect.apply(shards, *partials)
    return y


def stacked(outputs: Sequence[Tensor], shards: Shards) -> Tensor:
    """Stack the outputs of the n held shards: y[n, T, C] from y_v[T, C]."""
    y: Tensor = _Stack.apply(*outputs)
    return y


class HeldShards(nn.Module):
    """The layer of each held shard. Parameters that several shards have in common are one Parameter.

    Those are norm weights, and the weights of a shared KV head.

    Args:
        shards: all shards.
        layers: the layer of each held shard, made over `shards.ranks_of(v)`.

    Attributes:
        shards: the layer of each held shard, by its number.
    """

    def __init__(self, shards: Shards, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.cut = shards
        self.shards = nn.ModuleDict({str(shard): layer for shard, layer in zip(shards.held, layers, strict=True)})
        self._share_parameters()
        self.register_load_state_dict_post_hook(_share_again)

    def _apply(self, fn: Any, recurse: bool = True) -> HeldShards:
        # `to_empty` of a layer on the meta device gives every module a new parameter of its own.
        super()._apply(fn, recurse)
        self._share_parameters()
        return self

    def _share_parameters(self) -> None:
        """Let the held shards that have a parameter in common use one: that of the first of them."""
        layers, held = list(self.shards.values()), self.cut.held
        for shard, layer in zip(held, layers, strict=True):
            for name, part in layer.named_modules():
                first: Any = layers[0].get_submodule(name)
                said = part.tp_placements() if isinstance(part, SaysPlacements) else {}
                for kind, placement in said.items():
                    if placement.is_whole:
                        setattr(part, kind, getattr(first, kind))
                if isinstance(part, ColumnParallelLinear | WidthNorm) and part.replicas is not None:
                    holder = max(shard - part.replicas.rank, held.start)
                    if holder < shard:
                        owner: Any = layers[holder - held.start].get_submodule(name)
                        part.borrow(owner)


class ExactLayer(HeldShards):
    """An ordinary layer, computed shard by shard.

        y = join(layer_v(x_v) for every held shard v),   x_v = take(x)_v

    Args:
        shards, layers: as HeldShards.
        take: gives each shard its input: `spread` or `whole`.
        join: makes the output of the shards' outputs: `collect` or `stacked`.
    """

    def __init__(
        self,
        shards: Shards,
        layers: Sequence[nn.Module],
        take: Callable[[Tensor, Shards], Sequence[Tensor]],
        join: Callable[[Sequence[Tensor], Shards], Tensor],
    ) -> None:
        super().__init__(shards, layers)
        self.take, self.join = take, join

    def forward(self, x: Tensor, *arguments: Any) -> Tensor:
        """Compute the layer; every shard's layer is given `arguments` unchanged."""
        return self.join(self.outputs(self.take(x, self.cut), *arguments), self.cut)

    def outputs(self, inputs: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
        """Return what each held shard's layer makes of its input."""
        layers = self.shards.values()
        return [layer(of, *arguments) for layer, of in zip(layers, inputs, strict=True)]


class ExactMatmuls(ExactLayer):
    """An ExactLayer that multiplies all tokens by weights: attention, a feed-forward network, the output matrix.

    Args:
        shards, layers, join: as ExactLayer.

    It always multiplies by prepared weights, so that the bits are the same: forward prepares them if they are not. The
    bias of an output that the shards add up is added to the sum.
    """

    def __init__(
        self, shards: Shards, layers: Sequence[nn.Module], join: Callable[[Sequence[Tensor], Shards], Tensor]
    ) -> None:
        super().__init__(shards, layers, spread, join)
        self._prepared_of: Contents | None = None
        self._linears = [part for part in self.modules() if isinstance(part, ColumnParallelLinear | RowParallelLinear)]
        self._outputs = [part for part in self._linears if isinstance(part, RowParallelLinear)]
        for output in self._outputs:
            output.adds_bias = False

    def forward(self, x: Tensor, *arguments: Any) -> Tensor:
        """Compute the layer of x[T/tp, D]; the output's shape follows from `join`."""
        if self._prepared_of is None or not self._prepared_of.is_of(self._weights()):
            self.prepare(len(x) * self.cut.comm.size)
        y = super().forward(x, *arguments)
        if self._outputs and self._outputs[0].bias is not None:
            y = self._outputs[0].biased(y, [output.sink for output in self._outputs])
        return y

    def prepare(self, num_tokens: int) -> None:
        """Prepare the weights of all held shards: see ColumnParallelLinear.prepare.

        Args:
            num_tokens: T; each shard multiplies all of them.
        """
        for layer in self._layers():
            layer.prepare(num_tokens * self.cut.size)
        self._prepared_of = Contents(self._weights())

    def release(self) -> None:
        """Free the prepared weights of all held shards."""
        self._prepared_of = None
        for layer in self._layers():
            layer.release()

    def _layers(self) -> Iterator[Any]:
        yield from self.shards.values()

    def _weights(self) -> list[Tensor]:
        return [linear.weight for linear in self._linears]


class ExactWidthNormed(ExactMatmuls):
    """Attention whose queries and keys are normed over all heads: all held shards' are there before one goes on."""

    def outputs(self, inputs: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
        """See ExactLayer.outputs."""
        layers: list[Any] = list(self.shards.values())
        qkvs = [layer.projected(of, *arguments) for layer, of in zip(layers, inputs, strict=True)]
        normed = norm_over_ranks(qkvs, [(layer.q_norm, layer.k_norm) for layer in layers], self.cut.comm)
        return [layer.attended(qkv, *arguments) for layer, qkv in zip(layers, normed, strict=True)]


class ExactExperts(Placed, ExactMatmuls):
    """Experts whose whole networks lie on ranks that share them: all held shards' rows travel at once.

    Args:
        shards: all shards.
        layers: router, shared network and sums of each held shard.
        chunks: the networks, of which each shard is one chunk.
    """

    def __init__(self, shards: Shards, layers: Sequence[MixtureOfExperts], chunks: ChunkedExperts) -> None:
        super().__init__(shards, layers, collect)
        self.chunks = chunks

    def outputs(self, inputs: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
        """See ExactLayer.outputs."""
        layers: list[Any] = list(self.shards.values())
        for layer, x in zip(layers, inputs, strict=True):
            layer.check(x)
        routed = [layer.gate(x) for layer, x in zip(layers, inputs, strict=True)]
        made = self.chunks(inputs, routed)
        return [layer.joined(*each) for layer, *each in zip(layers, inputs, made, routed, strict=True)]


class ExactNorm(HeldShards):
    """A norm in blocks of T/V tokens, one per shard, all in one call; each shard's sink gets dw of its own block.

    Args:
        shards: all shards; V divides T.
        layers: the norm of each held shard.
    """

    def __init__(self, shards: Shards, layers: Sequence[Norm]) -> None:
        super().__init__(shards, layers)

    @property
    def weight(self) -> Parameter:
        """The weight [D], which all shards share."""
        return next(self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        """x[T/tp, D] -> y[T/tp, D]."""
        check_tokens(len(x) * self.cut.comm.size, self.cut.size, "shards")
        # Contiguous, since sums over strided rows are taken in another order.
        layers: list[Any] = list(self.shards.values())
        y: Tensor = layers[0].in_blocks(x.contiguous(), [layer.sink for layer in layers])
        return y

    # As Norm's.
    plain_forward = forward

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (y, total) as Norm.add does, in two passes: total is the sum of the whole tensors."""
        total = x + residual
        return self(total), total

    def beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (y, x): see Norm.beside. Here autograd adds the gradients."""
        return self(x), x


class ExactPositions(HeldShards):
    """Learned positions in blocks of T/V tokens, one per shard, as ExactNorm."""

    def __init__(self, shards: Shards, layers: Sequence[LearnedPositions]) -> None:
        super().__init__(shards, layers)

    def forward(self, x: Tensor, seq: Rows) -> Tensor:
        """x[T/tp, D] -> y[T/tp, D]."""
        layers: list[Any] = list(self.shards.values())
        first = self.cut.comm.rank * len(x)
        y: Tensor = layers[0].in_blocks(x, seq, first, [layer.sink for layer in layers])
        return y


def _share_again(layer: HeldShards, _: Any) -> None:
    """Share parameters again: `load_state_dict(assign=True)` gives every module a parameter of its own."""
    layer._share_parameters()
