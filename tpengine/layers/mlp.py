"""SwiGLU feed-forward network, its width cut over tp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from tpkernels.derivatives import differentiable_once
from tpkernels.ops.activation import activation_backward, activation_forward

from tpengine.layers.collectives import Communicator
from tpengine.layers.dropout import Dropout
from tpengine.layers.gradient_sink import GradientSink
from tpengine.layers.linear import ColumnParallelLinear, PackedWeights, RowParallelLinear


class _GatedSilu(torch.autograd.Function):
    """y[T, 2F] = (g, u) -> silu(g) * u;  dg = dsilu(dh * u, g), du = dh * silu(g), written side by side into dy.

    Backward computes silu(g) again, from y: the matmul's output is kept in any case.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return activation_forward(y, "silu", True)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dh: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return activation_backward(dh, y, "silu", True)


def gated_silu(y: Tensor) -> Tensor:
    """Return h[T, F] = silu(g) * u, where y[T, 2F] = (g, u) side by side."""
    h: Tensor = _GatedSilu.apply(y)
    return h


class SwiGLU(nn.Module):
    """Gated feed-forward network.

        g, u = all_gather_tp(x[T/tp, D]) @ (w_gate, w_up).T        one gather, one GEMM
        y[T/tp, D] = reduce_scatter_tp((silu(g) * u) @ w_down.T)

    Args:
        hidden_size, ffn_size: D and F, global; F divisible by tp.
        comm, sink, gathers_again, dtype, device: as ColumnParallelLinear.
        dropout: drops elements of silu(g) * u.

    Source: Shazeer, "GLU variants improve transformer", arXiv 2002.05202.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        comm: Communicator,
        *,
        dropout: Dropout | None = None,
        sink: GradientSink | None = None,
        gathers_again: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        options: dict[str, Any] = dict(sink=sink, gathers_again=gathers_again, dtype=dtype, device=device)
        self.gate_proj = ColumnParallelLinear(hidden_size, ffn_size, comm, **options)
        self.up_proj = ColumnParallelLinear(hidden_size, ffn_size, comm, **options)
        self.down_proj = RowParallelLinear(ffn_size, hidden_size, comm, **options)
        self._gate_up = PackedWeights(self.gate_proj, self.up_proj)

    def forward(self, x: Tensor) -> Tensor:
        """x[T/tp, D] -> y[T/tp, D]."""
        hidden = gated_silu(self._gate_up.forward_packed(x))
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
