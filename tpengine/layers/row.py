"""The row-parallel layer, and the Function that its product is: the dual of column.py's.

y[T/tp, D] = reduce_scatter_tp(x[T, F/tp] @ w[D, F/tp].T) + b[D]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.autocast import lowered
from tpkernels.derivatives import is_recorded, refuse_second_order
from tpkernels.exchange.communicator import Communicator
from tpkernels.fused.gather import gather_matmul
from tpkernels.fused.matmul_reduce_scatter import matmul_problem, matmul_reduce_scatter
from tpkernels.fused.scatter import matmul_scatter

from tpengine.layers.bias import add_whole_bias
from tpengine.layers.column import is_traceable
from tpengine.layers.gradient_sink import GradientSink, WeightTerm, check_reaches
from tpengine.layers.placement import Placement, check_divides, check_tokens, cut, whole
from tpengine.layers.prepared_weights import PreparedWeight


class RowParallelLinear(nn.Module):
    """Linear layer whose input features are cut over tp.

        y[T/tp, D] = reduce_scatter_tp(x[T, F/tp] @ w[D, F/tp].T) + b[D]
        dx[T, F/tp] = all_gather_tp(dy) @ w;  dw = all_gather(dy).T @ x;  db = the sum of dy, partial(tp)

    Args:
        in_features, out_features: F and D, global.
        comm, sink, dtype, device: as ColumnParallelLinear.
        bias: whether there is b, whole on every rank; it begins with zeros.
        gathers_again: gather dy once more for a weight gradient that is computed later, instead of keeping dy[T, D].

    Shape: x [T, F/tp], y [T/tp, D]; T must be divisible by tp.

    Raises:
        ValueError: F is not divisible by tp.

    Cost: 2*T*F/tp*D flops; (tp-1)/tp*T*D elements sent. Numerics: partial sums are added in a balanced tree of ranks,
    in at least float32; over NCCL, in NCCL's order.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        *,
        bias: bool = False,
        sink: GradientSink | None = None,
        gathers_again: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        columns = check_divides("row-parallel in_features", in_features, comm.size)
        self.comm, self.gathers_again = comm, gathers_again
        self._prepared: PreparedWeight | None = None
        self.sink: GradientSink = sink or GradientSink()
        self.weight = Parameter(torch.empty(out_features, columns, dtype=dtype, device=device))
        self.bias = Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None
        # Not by a layer of one shard: who adds the shards' outputs adds the bias to their sum.
        self.adds_bias = bias
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def tp_placements(self) -> Mapping[str, Placement]:
        """See SaysPlacements: columns are cut; the bias is whole, and each rank's gradient is of its own tokens."""
        return {"weight": cut(self.comm, 1), "bias": whole(self.comm)}

    def forward(self, x: Tensor) -> Tensor:
        """x[T, F/tp] -> y[T/tp, D]."""
        y = self._product(x)
        return y if self.bias is None or not self.adds_bias else self.biased(y, (self.sink,))

    def biased(self, y: Tensor, sinks: Sequence[GradientSink]) -> Tensor:
        """Return y[T/tp, D] + b; each sink gets the gradient of its block of tokens."""
        bias = self.bias
        assert bias is not None
        # Autograd, which the compiler leaves the gradient to, sums none over ranks, and gives none to another sink.
        are_autograds = all(sink.is_autograds for sink in sinks)
        if torch.compiler.is_compiling() and are_autograds and self.comm.size == 1:
            return y + bias.to(y.dtype)
        return add_whole_bias(y, bias, self.comm, sinks)

    def _product(self, x: Tensor) -> Tensor:
        """Return y[T/tp, D] without the bias.

        Raises:
            ValueError: x does not fit; or the weight is computed or hooked, and the sink would not reach it.
        """
        check_tokens(x.shape[0], self.comm.num_row_parts)
        # A weight may be computed: read it once. It gets the gradient, also where autocast multiplies a copy.
        weight = self.weight
        if is_traceable(self.sink, self.comm):
            return matmul_reduce_scatter(x, weight, self.comm)
        x, operand = lowered(x, weight)
        prepared = self._prepared and self._prepared.for_product(x, (weight,))
        if prepared is None and (problem := matmul_problem("matmul_reduce_scatter", x, operand, None)):
            self.comm.refuse(x, problem)
        check_reaches(self.sink, weight, "a row-parallel weight")
        if is_recorded():
            converted = None if operand is weight else operand.detach()
            y: Tensor = _RowParallel.apply(x, weight, converted, prepared, self)
            return y
        return matmul_scatter([(x, prepared.forward if prepared else operand.T)], self.comm, "matmul_reduce_scatter")

    def prepare(self, num_tokens: int) -> None:
        """Prepare the weight: see ColumnParallelLinear.prepare."""
        weight = self.weight
        self._prepared = PreparedWeight(weight.detach(), num_tokens // self.comm.num_row_parts, (weight,))

    def release(self) -> None:
        """Free the prepared copies."""
        self._prepared = None


class _RowParallel(torch.autograd.Function):
    """Local shapes: x[T, F/tp], w[D, F/tp], y[T/tp, D].

    forward:  y = reduce_scatter(x @ w.T)
    dgrad:    dx = all_gather(dy) @ w                  its dual
    wgrad:    dw = DY.T @ x, DY = all_gather(dy)       into the sink

    Both use the same DY. If dw is computed later, DY is kept until then, or with `gathers_again` gathered once more.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        converted: Tensor | None,
        prepared: PreparedWeight | None,
        layer: RowParallelLinear,
    ) -> Tensor:
        comm, multiplied = layer.comm, weight if converted is None else converted
        ctx.save_for_backward(x, multiplied)
        ctx.comm, ctx.sink, ctx.parameter, ctx.prepared = comm, layer.sink, weight, prepared
        ctx.gathers_again = layer.gathers_again
        matrix = prepared.forward if prepared else multiplied.T
        return matmul_scatter([(x, matrix)], comm, "matmul_reduce_scatter")

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("a row-parallel layer")
        x, weight = ctx.saved_tensors
        matrix = ctx.prepared.dgrad if ctx.prepared else weight
        matrices = [matrix] if ctx.needs_input_grad[0] else []
        parameter, comm, sink = ctx.parameter, ctx.comm, ctx.sink
        is_trained = ctx.needs_input_grad[1]
        keep = is_trained and not (sink.defers and ctx.gathers_again)
        # Gather DY; dgrad where x needs it.
        dxs, full = gather_matmul(dy, matrices, comm, x.shape[0], "matmul_reduce_scatter", keep=keep)
        dw = None
        if is_trained:
            # wgrad, now or in the weight half. Keep either DY or dy until then, not both.
            kept, gather = (dy, comm) if full is None else (full, None)
            (dw,) = sink.weight_grads([WeightTerm(parameter, 0, None)], kept, x, gather_dy=gather)
        return dxs[0] if dxs else None, dw, None, None, None
