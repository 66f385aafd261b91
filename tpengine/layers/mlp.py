"""SwiGLU feed-forward network, its width cut over tp."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpengine.collectives import Communicator
from tpengine.gradients import GradientSink
from tpengine.layers.linear import ColumnParallelLinear, PackedWeights, RowParallelLinear


class SwiGLU(nn.Module):
    """Gated feed-forward network.

        g, u = all_gather_tp(x[T/tp, D]) @ (w_gate, w_up).T        one gather, one GEMM
        y[T/tp, D] = reduce_scatter_tp((silu(g) * u) @ w_down.T)

    Args:
        hidden_size, ffn_size: D and F, global; F divisible by tp.
        comm, sink, dtype, device: as ColumnParallelLinear.

    Source: Shazeer, "GLU variants improve transformer", arXiv 2002.05202.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        comm: Communicator,
        *,
        sink: GradientSink | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.gate_proj = ColumnParallelLinear(hidden_size, ffn_size, comm, sink=sink, dtype=dtype, device=device)
        self.up_proj = ColumnParallelLinear(hidden_size, ffn_size, comm, sink=sink, dtype=dtype, device=device)
        self.down_proj = RowParallelLinear(ffn_size, hidden_size, comm, sink=sink, dtype=dtype, device=device)
        self._gate_up = PackedWeights(self.gate_proj, self.up_proj)

    def forward(self, x: Tensor) -> Tensor:
        """x[T/tp, D] -> y[T/tp, D]."""
        gate, up = self._gate_up.forward(x)
        y: Tensor = self.down_proj(F.silu(gate) * up)
        return y

    def prepare(self, num_tokens: int) -> None:
        """As ColumnParallelLinear.prepare, for all weights."""
        self._gate_up.prepare(num_tokens)
        self.down_proj.prepare(num_tokens)

    def release(self) -> None:
        """Go back to the weights themselves."""
        self._gate_up.release()
        self.down_proj.release()
