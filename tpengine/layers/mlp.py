"""Feed-forward networks, their width cut over tp."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from tpkernels.derivatives import differentiable_once, is_recorded
from tpkernels.exchange.communicator import Communicator
from tpkernels.ops.activation import activation_backward, activation_forward

from tpengine.layers.collectives import ShardCommunicator
from tpengine.layers.column import ColumnParallelLinear, PackedWeights
from tpengine.layers.dropout import Dropout
from tpengine.layers.gradient_sink import GradientSink
from tpengine.layers.row import RowParallelLinear

ActivationKind = Literal["silu", "gelu", "gelu_tanh"]


class _Activation(torch.autograd.Function):
    """gated:  y[T, 2F] = (g, u) -> act(g) * u;  dg = dact(dh * u, g), du = dh * act(g), side by side in dy.

    not gated:  y[T, F] -> act(y);  dy = dact(dh, y)

    Backward computes act again, from y: the matmul's output is kept in any case.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, kind: ActivationKind, gated: bool) -> Tensor:
        ctx.save_for_backward(y)
        ctx.kind, ctx.gated = kind, gated
        return activation_forward(y, kind, gated)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        return activation_backward(dh, y, ctx.kind, ctx.gated), None, None


def activated(y: Tensor, kind: ActivationKind, gated: bool) -> Tensor:
    """Return h[T, F] = act(g) * u, where y[T, 2F] = (g, u) side by side, or act(y[T, F]) without a gate."""
    if not is_recorded():
        return activation_forward(y, kind, gated)
    h: Tensor = _Activation.apply(y, kind, gated)
    return h


class FeedForward(nn.Module):
    """Feed-forward network of two products, with a gate or without.

        gated:      g, u = all_gather_tp(x[T/tp, D]) @ (w_gate, w_up).T + (b_gate, b_up)      one gather, one GEMM
                    y[T/tp, D] = reduce_scatter_tp((act(g) * u) @ w_down.T) + b_down
        not gated:  y[T/tp, D] = reduce_scatter_tp(act(all_gather_tp(x) @ w_up.T + b_up) @ w_down.T) + b_down

    The gate is multiplied in by a kernel of its own, or in the first product's epilogue where that was timed to be
    faster on this kind of GPU (PackedWeights.forward_gated).

    Args:
        hidden_size, ffn_size: D and F, global; F divisible by tp.
        comm, sink, gathers_again, dtype, device: as ColumnParallelLinear.
        activation: act; gelu_tanh is gelu's approximation by tanh.
        gated: whether there is a gate.
        bias: whether there are biases.
        dropout: drops elements between the products.

    Source: Shazeer, "GLU variants improve transformer", arXiv 2002.05202.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        comm: Communicator,
        *,
        activation: ActivationKind = "silu",
        gated: bool = True,
        bias: bool = False,
        dropout: Dropout | None = None,
        sink: GradientSink | None = None,
        gathers_again: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dropout, self.activation, self.gated = dropout, activation, gated
        options: dict[str, Any] = dict(bias=bias, sink=sink, gathers_again=gathers_again, dtype=dtype, device=device)
        if gated:
            self.gate_proj = ColumnParallelLinear(hidden_size, ffn_size, comm, **options)
        self.up_proj = ColumnParallelLinear(hidden_size, ffn_size, comm, **options)
        self.down_proj = RowParallelLinear(ffn_size, hidden_size, comm, **options)
        self._gate_up = PackedWeights(*((self.gate_proj, self.up_proj) if gated else (self.up_proj,)))
        # A shard of exact mode has the same bits wherever it is computed; what is tuned depends on sizes.
        self._may_fuse_gate = gated and comm.size == 1 and not isinstance(comm, ShardCommunicator)

    def forward(self, x: Tensor) -> Tensor:
        """x[T/tp, D] -> y[T/tp, D]."""
        members = (self.gate_proj, self.up_proj) if self.gated else (self.up_proj,)
        hidden = self._gate_up.forward_gated(x, members, self.activation) if self._may_fuse_gate else None
        if hidden is None:
            hidden = activated(self._gate_up.forward_packed(x, members), self.activation, self.gated)
        if self.dropout is not None:
            comm, columns = self.down_proj.comm, hidden.shape[1]
            hidden = self.dropout(hidden, 0, comm.rank * columns, comm.size * columns)
        y: Tensor = self.down_proj(hidden)
        return y

    def prepare(self, num_tokens: int) -> None:
        """Prepare all weights: see ColumnParallelLinear.prepare."""
        self._gate_up.prepare(num_tokens)
        self.down_proj.prepare(num_tokens)

    def release(self) -> None:
        """Release all prepared weights: see ColumnParallelLinear.release."""
        self._gate_up.release()
        self.down_proj.release()


class SwiGLU(FeedForward):
    """The gated network with silu and without biases: FeedForward's defaults, under its own name."""
