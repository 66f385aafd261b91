"""Column- and row-parallel linear layers on token-major, sequence-sharded activations.

Their products are in products.py; biases are added behind them (bias.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.autocast import lowered
from tpkernels.fused.all_gather_matmul import all_gather_matmul
from tpkernels.fused.matmul_reduce_scatter import matmul_problem, matmul_reduce_scatter

from tpengine.layers.collectives import Communicator
from tpengine.layers.gradient_sink import GradientSink
from tpengine.layers.linear.bias import add_cut_bias, add_whole_bias
from tpengine.layers.linear.memory import Packing, lies_at
from tpengine.layers.linear.prepared import PreparedWeight
from tpengine.layers.linear.products import check_gather, column_product, is_traceable, row_product
from tpengine.layers.linear.sizes import check_divides, check_tokens
from tpengine.layers.placement import Placement, cut, whole


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

    Attributes:
        rows: F/tp * replicas.size, those of the weight.
        borrows: the parameters are another layer's.
        place: where the weight's owner keeps it, if that is neither this layer nor another: see memory.py.
        is_fresh: the layer has given its weight other memory, and nothing has laid it out since.

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
        self.comm, self.replicas, self.gathers_again, self.rows = comm, replicas, gathers_again, rows
        self.borrows, self.is_fresh = False, True
        self.place: Tensor | None = None
        self._packing: weakref.ref[Packing] | None = None
        self._prepared: PreparedWeight | None = None
        self.sink: GradientSink = sink or GradientSink()
        self.weight = Parameter(torch.empty(rows, in_features, dtype=dtype, device=device))
        self.bias = Parameter(torch.zeros(rows, dtype=dtype, device=device)) if bias else None
        nn.init.normal_(self.weight, std=in_features**-0.5)
        if replicas is not None and not self.weight.is_meta:
            # The replicas' gradients are summed, so their weights must start equal, whatever each generator drew.
            replicas.broadcast_(self.weight.detach())

    def tp_placements(self) -> Mapping[str, Placement]:
        """See SaysPlacements: rows are cut, those of the weight and of the bias."""
        rows = cut(self.comm, 0, shared_by=self.replicas)
        return {"weight": rows, "bias": rows}

    def borrow(self, owner: ColumnParallelLinear) -> None:
        """Share the parameters of another layer of the same shape: both layers then have the same."""
        self.weight, self.bias, self.borrows = owner.weight, owner.bias, True

    def pack_with(self, packing: Packing) -> None:
        """Have `packing` lay the weight out beside others whenever this layer gives it other memory."""
        self._packing = weakref.ref(packing)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ColumnParallelLinear:
        before = self._memory()
        super()._apply(fn, recurse)
        if self._memory() != before:
            self._has_moved()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        before = self._parameters.get("weight")
        super()._load_from_state_dict(*args)
        if self._parameters.get("weight") is not before:
            # assign=True: it is the state's tensor now.
            self._has_moved()

    def _memory(self) -> tuple[object, ...] | None:
        weight = self._parameters.get("weight")
        return None if weight is None else (weight.device, weight.dtype, weight.data_ptr())

    def _has_moved(self) -> None:
        if self.place is not None and not lies_at(self.weight, self.place):
            raise RuntimeError(
                f"a weight's memory has one owner: a weight {list(self.weight.shape)} that lies in flat buffers has "
                "been given other memory: move a model, or load it with assign=True, before it is laid into buffers"
            )
        self.is_fresh = True
        packing = self._packing() if self._packing is not None else None
        if packing is not None:
            packing.lay_out()

    def __getstate__(self) -> dict[str, Any]:
        # A copy's weight has memory of its own, and lies beside no others until its packing is copied too.
        return {**self.__dict__, "_packing": None, "place": None, "is_fresh": True}

    def forward(self, x: Tensor) -> Tensor:
        """x[T/tp, D] -> y[T, F/tp]."""
        return with_biases(self._product(x), (self,))

    def _product(self, x: Tensor) -> Tensor:
        # A weight may be computed: read it once.
        weight = self.weight
        if is_traceable((self,)):
            return all_gather_matmul(x, (weight,), self.comm)[0]
        x, operand = lowered(x, weight)
        prepared = self._prepared and self._prepared.for_product(x, (weight,))
        if prepared is None:
            check_gather(x, (operand,), self.comm)
        return column_product(x, operand.detach(), prepared, (self,), (weight,))

    def prepare(self, num_tokens: int) -> None:
        """Copy the weight into the layout that its matmuls read fastest; the copies are used until the weight changes.

        Args:
            num_tokens: T of the matmuls that follow, over all ranks.

        Cost: memory of up to two copies of the weight, until `release`: see PreparedMatrix.
        """
        weight = self.weight
        self._prepared = PreparedWeight(weight.detach(), num_tokens // self.comm.num_row_parts, (weight,))

    def release(self) -> None:
        """Free the prepared copies."""
        self._prepared = None


def with_biases(y: Tensor, layers: Sequence[ColumnParallelLinear]) -> Tensor:
    """Add the layers' biases, of all or of none, to their products y[T, F/tp], side by side."""
    biases = []
    # A loop: torch.compile cannot trace an assignment inside of a comprehension.
    for layer in layers:
        # A bias may be computed: read it once.
        bias = layer.bias
        if bias is not None:
            biases.append((bias, layer.replicas))
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
        check_tokens(x.shape[0], self.comm.num_row_parts)
        weight = self.weight
        if is_traceable((self,)):
            return matmul_reduce_scatter(x, weight, self.comm)
        x, operand = lowered(x, weight)
        prepared = self._prepared and self._prepared.for_product(x, (weight,))
        if prepared is None and (problem := matmul_problem("matmul_reduce_scatter", x, operand, None)):
            self.comm.refuse(x, problem)
        return row_product(x, weight, operand, prepared, self)

    def prepare(self, num_tokens: int) -> None:
        """Prepare the weight: see ColumnParallelLinear.prepare."""
        weight = self.weight
        self._prepared = PreparedWeight(weight.detach(), num_tokens // self.comm.num_row_parts, (weight,))

    def release(self) -> None:
        """Free the prepared copies."""
        self._prepared = None
