"""Layers of exact mode: each real rank plays several virtual tensor-parallel ranks, one after the other.

    spread:    x[T/tp, D] -> X[T, D], once for each virtual rank;   dx = reduce_scatter of their dX, in a balanced tree
    collect:   partial y_v[T, D] of each virtual rank v -> y[T/tp, D], added in a balanced tree;   dy_v = all_gather(dy)

Between the two a virtual rank does what a real one does at tp = V, alone and in shapes that follow from V and T. So no
operation's shape, stride or alignment depends on tp, and neither do its bits; nor do the trees (exchange/tree.py).
Elementwise additions and products between activations need no such care: their results do not depend on shapes.

The price: gathers and sums are not overlapped with matmuls, partial sums travel in at least float32, each matmul is a
V/tp-th of the fast one's, and with fewer KV heads than virtual ranks K and V are computed by each virtual rank.

Sources: TBIK (arXiv 2511.17826) makes forward passes of any tp agree by one binary tree inside a GPU and between them;
EasyScale (SC 2023) has data-parallel workers of a fixed number play by any number of GPUs. Here both are one idea, also
for backward, pipelines, dropout and the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.derivatives import differentiable_once, refuse_second_order
from tpkernels.ops.matmul.host import product

from tpengine.layers.attention import attend
from tpengine.layers.collectives import Communicator
from tpengine.layers.dropout import Dropout
from tpengine.layers.gradient_sink import GradientSink, ParamGradSink
from tpengine.layers.linear import PreparedWeight, check_divides, check_tokens
from tpengine.layers.loss import check_range
from tpengine.layers.mlp import gated_silu
from tpengine.layers.norm import rms_norm
from tpengine.layout.parameters import ALIGNMENT_BYTES


@dataclass(frozen=True)
class VirtualRanks:
    """The virtual tensor-parallel ranks.

    Attributes:
        comm: the real ones; their number divides `size`.
        size: V, a power of two.

    Raises:
        ValueError: V is no power of two, or the real ranks do not divide it.
    """

    comm: Communicator
    size: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.size & (self.size - 1) or self.size % self.comm.size:
            raise ValueError(
                f"virtual ranks must be a power of two that the real ranks divide: {self.size} virtual, "
                f"{self.comm.size} real: use 8 on 1, 2, 4 or 8 ranks"
            )

    @property
    def held(self) -> range:
        """Those that this rank plays."""
        each = self.size // self.comm.size
        return range(self.comm.rank * each, (self.comm.rank + 1) * each)


class _Spread(torch.autograd.Function):
    """x[T/tp, D] -> X[T, D] for each held virtual rank;  dx = tree_reduce_scatter(dX_v)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, virtual: VirtualRanks) -> tuple[Tensor, ...]:
        ctx.comm, ctx.dtype = virtual.comm, x.dtype
        full = virtual.comm.all_gather(x)
        return tuple(full.view_as(full) for _ in virtual.held)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.reduce_scatter_in_tree(grads).to(ctx.dtype), None


class _Collect(torch.autograd.Function):
    """y_v[T, D] of each held virtual rank -> y[T/tp, D] = tree_reduce_scatter(y_v);  dy_v = all_gather(dy)."""

    @staticmethod
    def forward(ctx: Any, virtual: VirtualRanks, *partials: Tensor) -> Tensor:
        ctx.comm, ctx.num = virtual.comm, len(partials)
        return virtual.comm.reduce_scatter_in_tree(partials).to(partials[0].dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        full = ctx.comm.all_gather(dy.contiguous())
        return (None,) + (full,) * ctx.num


def spread(x: Tensor, virtual: VirtualRanks) -> tuple[Tensor, ...]:
    """Give every held virtual rank all tokens: X_v[T, D] = all_gather(x[T/tp, D]); gradients are added in a tree."""
    return _Spread.apply(x, virtual)


def collect(partials: Sequence[Tensor], virtual: VirtualRanks) -> Tensor:
    """Add the virtual ranks' partial tensors in a tree, keep this rank's tokens: y[T/tp, D] from y_v[T, D]."""
    y: Tensor = _Collect.apply(virtual, *partials)
    return y


class _Linear(torch.autograd.Function):
    """Local shapes: x[T, D], w = (w_0, w_1, ...)[F, D], y = (y_0, y_1, ...)[T, F] side by side.

    forward:  y = x @ w.T
    dgrad:    dx = dy @ w
    wgrad:    dw_i = dy_i.T @ x       into the sink
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, prepared: PreparedWeight, sink: GradientSink, *weights: Parameter) -> Tensor:
        x = _aligned(x)
        ctx.save_for_backward(x)
        ctx.prepared, ctx.sink, ctx.parameters = prepared, sink, weights
        return product(x, prepared.forward)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("an exact linear layer")
        (x,) = ctx.saved_tensors
        dy = _aligned(dy)
        for weight, piece in zip(ctx.parameters, dy.split([len(w) for w in ctx.parameters], dim=1), strict=True):
            ctx.sink.weight_grad(weight, x, piece)
        return (product(dy, ctx.prepared.dgrad), None, None) + (None,) * len(ctx.parameters)


def _aligned(x: Tensor) -> Tensor:
    """x without gaps, beginning at a cache line."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT_BYTES else x


class _Weight(nn.Module):
    """A weight [out, in] under the name it has in the fast layers."""

    def __init__(
        self, num_rows: int, num_columns: int, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.weight = Parameter(torch.empty(num_rows, num_columns, dtype=dtype, device=device))
        nn.init.normal_(self.weight, std=num_columns**-0.5)


class _Matrices:
    """The weights that one virtual rank multiplies by at once, laid out for it when they have changed.

    Memory: a copy of several weights side by side, until `release`; and what PreparedMatrix lays out.
    """

    def __init__(self, sink: GradientSink, *layers: _Weight) -> None:
        self._sink, self._layers = sink, layers
        self._prepared: PreparedWeight | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x[T, D] -> (y_0, y_1, ...)[T, F]."""
        y: Tensor = _Linear.apply(x, self.prepare(len(x)), self._sink, *self._weights())
        return y

    def prepare(self, num_tokens: int) -> PreparedWeight:
        """Lay the weights out, unless they are as they were last time."""
        weights = self._weights()
        self._prepared = self._prepared and self._prepared.if_current(weights)
        if self._prepared is None:
            whole = torch.cat([w.detach() for w in weights]) if len(weights) > 1 else weights[0].detach()
            self._prepared = PreparedWeight(whole, num_tokens, weights)
        return self._prepared

    def release(self) -> None:
        """Give the prepared copies' memory back."""
        self._prepared = None

    def _weights(self) -> list[Parameter]:
        return [layer.weight for layer in self._layers]


class VirtualLayer(nn.Module):
    """What is common: a shard for each virtual rank, under its number."""

    def __init__(self, virtual: VirtualRanks, sinks: Sequence[GradientSink] | None) -> None:
        super().__init__()
        self.virtual = virtual
        self.sinks: Sequence[GradientSink] = sinks or [ParamGradSink() for _ in virtual.held]
        self.shards = nn.ModuleDict()
        self._matrices: list[_Matrices] = []

    def _matrices_of(self, rank: int, *layers: _Weight) -> _Matrices:
        matrices = _Matrices(self.sinks[rank - self.virtual.held.start], *layers)
        self._matrices.append(matrices)
        return matrices

    def prepare(self, num_tokens: int) -> None:
        """As ColumnParallelLinear.prepare; left out, the first product does it."""
        for matrices in self._matrices:
            matrices.prepare(num_tokens)

    def release(self) -> None:
        """Give the prepared copies' memory back."""
        for matrices in self._matrices:
            matrices.release()


class VirtualAttention(VirtualLayer):
    """As layers.Attention, computed by virtual ranks.

        q, k, v = X[T, D] @ (wq_v, wk_v, wv_v).T
        y[T/tp, D] = tree over v of softmax(q k.T / sqrt(E), causal) v @ wo_v.T

    Args:
        hidden_size, num_heads, num_kv_heads: D, H, G, global; V divides H, and divides G or is divided by it.
        virtual: the virtual ranks.
        rope_theta: base of the rotary frequencies.
        dropout: of the attention probabilities.
        sinks: one a held virtual rank; default `weight.grad`.
        dtype, device: of the weights.

    Raises:
        ValueError: heads that do not divide; no sinks, and ranks share a KV head, each with a part of its gradient.

    With G < V a KV head's weight is one parameter for those of its virtual ranks that this rank plays; each adds the
    gradient of its own query heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        virtual: VirtualRanks,
        *,
        rope_theta: float = 10000.0,
        dropout: Dropout | None = None,
        sinks: Sequence[GradientSink] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(virtual, sinks)
        self.head_size, self.num_heads = hidden_size // num_heads, num_heads
        self.rope_theta, self.dropout = rope_theta, dropout
        self._each = check_divides("num_heads", num_heads, virtual.size)
        if num_kv_heads % virtual.size and virtual.size % num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide the virtual ranks or be divisible by them: num_kv_heads {num_kv_heads}, "
                f"virtual ranks {virtual.size}: use num_kv_heads {virtual.size}"
            )
        replicas = max(1, virtual.size // num_kv_heads)
        if sinks is None and replicas > len(virtual.held):
            raise ValueError(
                f"num_kv_heads must be at least tp unless sinks sum over the ranks that share a head: num_kv_heads "
                f"{num_kv_heads}, tp {virtual.comm.size}: pass sinks"
            )
        self._kv_each = max(1, num_kv_heads // virtual.size)
        self._inputs, self._outputs = [], []
        queries, keys = self._each * self.head_size, self._kv_each * self.head_size
        kv: tuple[_Weight, _Weight] | None = None
        for rank in virtual.held:
            if kv is None or rank % replicas == 0:
                kv = _Weight(keys, hidden_size, dtype, device), _Weight(keys, hidden_size, dtype, device)
            q, o = _Weight(queries, hidden_size, dtype, device), _Weight(hidden_size, queries, dtype, device)
            self._inputs.append(self._matrices_of(rank, q, *kv))
            self._outputs.append(self._matrices_of(rank, o))
            self.shards[str(rank)] = nn.ModuleDict({"q_proj": q, "k_proj": kv[0], "v_proj": kv[1], "o_proj": o})

    def forward(self, x: Tensor, seq: int) -> Tensor:
        """x[T/tp, D] -> y[T/tp, D], attention within each of the T/seq sequences."""
        partials = []
        for rank, full, qkv, out in zip(
            self.virtual.held, spread(x, self.virtual), self._inputs, self._outputs, strict=True
        ):
            drop = self.dropout.of_heads(rank * self._each, self.num_heads) if self.dropout else None
            partials.append(out(attend(qkv(full), self._each, self._kv_each, seq, self.rope_theta, drop)))
        return collect(partials, self.virtual)


class VirtualSwiGLU(VirtualLayer):
    """As layers.SwiGLU, computed by virtual ranks.

        g, u = X[T, D] @ (w_gate_v, w_up_v).T;   y[T/tp, D] = tree over v of (silu(g) * u) @ w_down_v.T

    Args:
        hidden_size, ffn_size: D and F, global; V divides F.
        virtual, sinks, dtype, device: as VirtualAttention.
        dropout: of silu(g) * u.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        virtual: VirtualRanks,
        *,
        dropout: Dropout | None = None,
        sinks: Sequence[GradientSink] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(virtual, sinks)
        self.ffn_size, self.dropout = ffn_size, dropout
        self._each = check_divides("ffn_size", ffn_size, virtual.size)
        self._inputs, self._outputs = [], []
        for rank in virtual.held:
            gate, up = (_Weight(self._each, hidden_size, dtype, device) for _ in range(2))
            down = _Weight(hidden_size, self._each, dtype, device)
            self._inputs.append(self._matrices_of(rank, gate, up))
            self._outputs.append(self._matrices_of(rank, down))
            self.shards[str(rank)] = nn.ModuleDict({"gate_proj": gate, "up_proj": up, "down_proj": down})

    def forward(self, x: Tensor) -> Tensor:
        """x[T/tp, D] -> y[T/tp, D]."""
        partials = []
        for rank, full, gate_up, down in zip(
            self.virtual.held, spread(x, self.virtual), self._inputs, self._outputs, strict=True
        ):
            hidden = gated_silu(gate_up(full))
            if self.dropout is not None:
                hidden = self.dropout(hidden, 0, rank * self._each, self.ffn_size)
            partials.append(down(hidden))
        return collect(partials, self.virtual)


class VirtualRMSNorm(nn.Module):
    """As layers.RMSNorm, in blocks of T/V tokens, one a virtual rank, which adds its part of the weight's gradient.

    Args:
        hidden_size: D.
        virtual: the virtual ranks; T is divisible by V.
        eps, dtype, device: as layers.RMSNorm.
        sinks: one a held virtual rank.
    """

    def __init__(
        self,
        hidden_size: int,
        virtual: VirtualRanks,
        *,
        eps: float = 1e-5,
        sinks: Sequence[GradientSink] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.virtual, self.eps = virtual, eps
        self.sinks: Sequence[GradientSink] = sinks or [ParamGradSink() for _ in virtual.held]
        self.weight = Parameter(torch.ones(hidden_size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """x[T/tp, D] -> y[T/tp, D]."""
        comm = self.virtual.comm
        check_tokens(len(x) * comm.size, self.virtual.size, "virtual ranks")
        # Sums over strided rows are taken in another order.
        blocks = x.contiguous().chunk(len(self.virtual.held))
        normed = [
            rms_norm(block, self.weight, self.eps, comm, sink) for block, sink in zip(blocks, self.sinks, strict=True)
        ]
        return normed[0] if len(normed) == 1 else torch.cat(normed)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """As layers.RMSNorm.add; in two passes."""
        total = x + residual
        return self(total), total


class _VirtualLookup(torch.autograd.Function):
    """Local shapes: tokens[T] (all of them on every rank), w_v, its rank's share of the rows, y[T/tp, D].

    forward:  y = tree_reduce_scatter(rows of the w_v for tokens of their ranges, zero for others)
    wgrad:    dw_v[token] += all_gather(dy)[t] for the tokens of its range in their order, into the sink
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, virtual: VirtualRanks, sinks: Sequence[GradientSink], *weights: Parameter
    ) -> Tensor:
        ctx.virtual, ctx.sinks, ctx.parameters = virtual, sinks, weights
        num_rows, columns = weights[0].shape
        partial = weights[0].new_zeros(len(tokens), columns)
        places = []
        for rank, weight in zip(virtual.held, weights, strict=True):
            rows = tokens - rank * num_rows
            mine = ((rows >= 0) & (rows < num_rows)).nonzero()[:, 0]
            rows = rows[mine]
            partial[mine] = weight[rows]
            places += [rows, mine]
        ctx.save_for_backward(*places)
        y = virtual.comm.reduce_scatter_in_tree([partial])
        # -0 + 0 is 0: a negative zero would be the only value that depends on whether others have added nothing.
        return y.add_(0.0).to(weights[0].dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, ...]:
        refuse_second_order("an exact embedding")
        full = ctx.virtual.comm.all_gather(dy.contiguous())
        places = ctx.saved_tensors
        for i, (sink, weight) in enumerate(zip(ctx.sinks, ctx.parameters, strict=True)):
            rows, mine = places[2 * i : 2 * i + 2]
            sink.add_rows(weight, rows, full[mine])
        return (None, None, None) + (None,) * len(ctx.parameters)


class VirtualEmbedding(VirtualLayer):
    """As layers.VocabParallelEmbedding, its rows cut over the virtual ranks.

    Args:
        num_embeddings, embedding_dim: rows (a multiple of the virtual ranks) and D, global.
        virtual, sinks, dtype, device: as VirtualAttention.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        virtual: VirtualRanks,
        *,
        sinks: Sequence[GradientSink] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(virtual, sinks)
        num_rows = check_divides("num_embeddings", num_embeddings, virtual.size)
        for rank in virtual.held:
            shard = _Weight(num_rows, embedding_dim, dtype, device)
            nn.init.normal_(shard.weight, std=0.02)
            self.shards[str(rank)] = shard

    @property
    def weights(self) -> list[Parameter]:
        """The shards of the held virtual ranks."""
        return list(self.parameters())

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens[T] -> y[T/tp, D]."""
        weights = self.weights
        check_tokens(len(tokens), self.virtual.size, "virtual ranks")
        check_range("tokens", tokens, len(weights[0]) * self.virtual.size)
        y: Tensor = _VirtualLookup.apply(tokens, self.virtual, self.sinks, *weights)
        return y


class VirtualHead(VirtualLayer):
    """The output matrix, its rows cut over the virtual ranks.

        z_v[T, share of the vocabulary] = X[T, D] @ w_v.T

    Args:
        in_features, out_features: D and the vocabulary, global; the virtual ranks divide it.
        virtual, sinks, dtype, device: as VirtualAttention.
        weights: of an embedding, used as they are; default new ones.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        virtual: VirtualRanks,
        *,
        weights: Sequence[Parameter] | None = None,
        sinks: Sequence[GradientSink] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(virtual, sinks)
        self._outputs = []
        num_rows = check_divides("out_features", out_features, virtual.size)
        for i, rank in enumerate(virtual.held):
            shard = _Weight(num_rows, in_features, dtype, device)
            if weights is not None:
                shard.weight = weights[i]
            self._outputs.append(self._matrices_of(rank, shard))
            self.shards[str(rank)] = shard

    def forward(self, x: Tensor) -> Tensor:
        """x[T/tp, D] -> logits[n, T, columns], a shard for each of the n held virtual ranks."""
        full = spread(x, self.virtual)
        return torch.stack([out(shard) for out, shard in zip(self._outputs, full, strict=True)])
