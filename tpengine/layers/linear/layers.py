"""Column- and row-parallel linear layers on token-major, sequence-sharded activations.

Their products are in products.py; biases are added behind them (bias.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.autocast import lowered
from tpkernels.fused.all_gather_matmul import all_gather_matmul
from tpkernels.fused.matmul_reduce_scatter import matmul_problem, matmul_reduce_scatter

from tpengine.layers.collectives import Communicator
from tpengine.layers.gradient_sink import GradientSink, ParamGradSink
from tpengine.layers.linear.bias import add_cut_bias, add_whole_bias
from tpengine.layers.linear.prepared import PreparedWeight
from tpengine.layers.linear.products import check_gather, column_product, is_traceable, row_product
from tpengine.layers.linear.sizes import check_divides, check_tokens


class ColumnParallelLinear(nn.Module):
    """Linear layer whose output features are cut over tp.

        y[T, F/tp] = all_gather_tp(x[T/tp, D]) @ w[F/tp, D].T + b[F/tp]
        dx[T/tp, D] = reduce_scatter_tp(dy @ w);  dw = dy.T @ all_gather(x);  db = the sum of dy over tokens

    Args:
        in_features, out_features: D and F, global.
        comm: the tp ranks.
        bias: whether there is b, cut as the weight's rows; it begins with zeros.
        sink: where the weight gradient goes; default `weight.grad`.
        replicas: the consecutive tp ranks that hold the same shard, each with only a part of its gradient (fewer KV
            heads than tp ranks); default none. Construction is then collective: all take the first one's weight.
        gathers_again: keep x[T/tp, D] for the weight gradient and gather it again there, instead of keeping x[T, D].
        dtype, device: of the weight, as torch.

    Shape: x [T/tp, D], this rank's tokens, contiguous; y [T, F/tp * replicas.size].

    Raises:
        ValueError: F is not divisible by the number of shards.

    Cost: 2*T*F/tp*D flops; (tp-1)/tp*T*D elements received; keeps T*D elements for backward, T/tp*D with
        `gathers_again`, which receives them a second time.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Communicator,
        *,
        bias: bool = False,
        sink: GradientSink | None = None,
        replicas: Communicator | None = None,
        gathers_again: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        shards = comm.size // (replicas.size if replicas else 1)
        rows = check_divides("column-parallel out_features", out_features, shards)
        self.comm, self.replicas, self.gathers_again = comm, replicas, gathers_again
        self.borrows = False
        self._prepared: PreparedWeight | None = None
        self.sink: GradientSink = sink or ParamGradSink()
        self.weight = Parameter(torch.empty(rows, in_features, dtype=dtype, device=device))
        self.bias = Parameter(torch.zeros(rows, dtype=dtype, device=device)) if bias else None
        nn.init.normal_(self.weight, std=in_features**-0.5)
        if replicas is not None and not self.weight.is_meta:
            # The replicas' gradients are summed, so their weights must start equal, whatever each generator drew.
            replicas.broadcast_(self.weight.detach())

    def borrow(self, owner: ColumnParallelLinear) -> None:
        """Share the parameters of another layer of the same shape: both layers then have the same."""
        self.weight, self.bias, self.borrows = owner.weight, owner.bias, True

    def forward(self, x: Tensor) -> Tensor:
        """x[T/tp, D] -> y[T, F/tp]."""
        return with_biases(self._product(x), (self,))

    def _product(self, x: Tensor) -> Tensor:
        if is_traceable((self,)):
            return all_gather_matmul(x, (self.weight,), self.comm)[0]
        x, weight = lowered(x, self.weight)
        prepared = self._prepared and self._prepared.for_product(x, (self.weight,))
        if prepared is None:
            check_gather(x, (weight,), self.comm)
        return column_product(x, weight.detach(), prepared, (self,))

    def prepare(self, num_tokens: int) -> None:
        """Copy the weight into the layout that its matmuls read fastest; the copies are used until the weight changes.

        Args:
            num_tokens: T of the matmuls that follow, over all ranks.

        Cost: memory of up to two copies of the weight, until `release`: see PreparedMatrix.
        """
        self._prepared = PreparedWeight(self.weight.detach(), num_tokens // self.comm.num_row_parts, (self.weight,))

    def release(self) -> None:
        """Free the prepared copies."""
        self._prepared = None


def with_biases(y: Tensor, layers: Sequence[ColumnParallelLinear]) -> Tensor:
    """Add the layers' biases, of all or of none, to their products y[T, F/tp], side by side."""
    biases = [(layer.bias, layer.replicas) for layer in layers if layer.bias is not None]
    return add_cut_bias(y, biases, layers[0].sink) if biases else y


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
        self.replicas: Communicator | None = None
        self._prepared: PreparedWeight | None = None
        self.sink: GradientSink = sink or ParamGradSink()
        self.weight = Parameter(torch.empty(out_features, columns, dtype=dtype, device=device))
        self.bias = Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None
        # Not by a layer of one shard: who adds the shards' outputs adds the bias to their sum.
        self.adds_bias = bias
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """x[T, F/tp] -> y[T/tp, D]."""
        y = self._product(x)
        return y if self.bias is None or not self.adds_bias else self.biased(y, (self.sink,))

    def biased(self, y: Tensor, sinks: Sequence[GradientSink]) -> Tensor:
        """Return y[T/tp, D] + b; each sink gets the gradient of its block of tokens."""
        assert self.bias is not None
        if torch.compiler.is_compiling() and self.comm.size == 1:
            return y + self.bias.to(y.dtype)
        return add_whole_bias(y, self.bias, self.comm, sinks)

    def _product(self, x: Tensor) -> Tensor:
        check_tokens(x.shape[0], self.comm.num_row_parts)
        if is_traceable((self,)):
            return matmul_reduce_scatter(x, self.weight, self.comm)
        x, weight = lowered(x, self.weight)
        prepared = self._prepared and self._prepared.for_product(x, (self.weight,))
        if prepared is None and (problem := matmul_problem("matmul_reduce_scatter", x, weight, None)):
            self.comm.refuse(x, problem)
        return row_product(x, weight, prepared, self)

    def prepare(self, num_tokens: int) -> None:
        """Prepare the weight: see ColumnParallelLinear.prepare."""
        self._prepared = PreparedWeight(self.weight.detach(), num_tokens // self.comm.num_row_parts, (self.weight,))

    def release(self) -> None:
        """Free the prepared copies."""
        self._prepared = None
