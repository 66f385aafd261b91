"""Column- and row-parallel linear layers on token-major, sequence-sharded activations.

    column:  y[T, F/tp] = all_gather_tp(x[T/tp, D]) @ w[F/tp, D].T
    row:     y[T/tp, D] = reduce_scatter_tp(x[T, F/tp] @ w[D, F/tp].T)

Each is the other's dual: the backward of the gather is a reduce-scatter, and the other way round. Several
column-parallel weights share one gather and one GEMM when their storage is packed (`PackedWeights`). They remain
separate parameters: a fused [q; k; v] shard, loaded at another tp, would have the right shape and permuted rows, and
nothing would fail.

Biases are added behind the products (bias.py). Weight gradients go to a sink (gradient_sink.py), not through autograd.
The one exception is torch.compile, which cannot trace sinks: there the registered operators are used, and autograd
accumulates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn import Parameter
from tpkernels.derivatives import applied, refuse_second_order
from tpkernels.fused.all_gather_matmul import all_gather_matmul, gather_problem
from tpkernels.fused.exchange_matmul import DTYPES, gather_matmul, matmul_scatter, scatter_and_gather
from tpkernels.fused.matmul_reduce_scatter import matmul_problem, matmul_reduce_scatter
from tpkernels.ops.matmul.host import PreparedMatrix

from tpengine.layers.bias import add_cut_bias, add_whole_bias
from tpengine.layers.collectives import Communicator
from tpengine.layers.gradient_sink import GradientSink, ParamGradSink


class PreparedWeight:
    """The two forms in which a weight w[out, in] is multiplied, copied into the layout that a matmul reads fastest.

    forward:  m = w.T       dgrad:  m = w, copied when a backward first asks for it
    """

    def __init__(self, weight: Tensor, num_rows: int, parameters: Sequence[Tensor]) -> None:
        self._weight, self._num_rows = weight, num_rows
        self.forward = PreparedMatrix(weight.T, num_rows)
        self._made_of = contents_of(parameters)
        self._is_multiplied = weight.dtype in DTYPES

    @functools.cached_property
    def dgrad(self) -> PreparedMatrix:
        """The form that dgrad multiplies by; without a backward nobody pays for it."""
        return PreparedMatrix(self._weight, self._num_rows)

    def __deepcopy__(self, memo: object) -> None:
        """Return None: a copied layer has another weight, which is not prepared."""
        return None

    def for_product(self, x: Tensor, parameters: Sequence[Tensor]) -> PreparedWeight | None:
        """Return self, or None: a parameter was written to or replaced since, or x[., in] does not fit.

        If it is self, nothing is left to check: a pass over one token has many products, and little time for each.
        """
        weight = self._weight
        fits = x.ndim == 2 and x.shape[1] == weight.shape[1] and x.dtype == weight.dtype and x.device == weight.device
        return self if fits and self._is_multiplied and contents_of(parameters) == self._made_of else None


def contents_of(parameters: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return address and autograd version of each parameter: they change when it is written to or replaced."""
    return [(parameter.data_ptr(), parameter._version) for parameter in parameters]


class _ColumnParallel(torch.autograd.Function):
    """Local shapes: x[T/tp, D], w = (w_0, w_1, ...)[F/tp, D], y = (y_0, y_1, ...)[T, F/tp].

    forward:  y = all_gather(x) @ w.T                  one gather, one matmul on the packed weights
    dgrad:    dx = reduce_scatter(dy @ w)              its dual
    wgrad:    dw_i = dy_i.T @ X, X = all_gather(x)     into the sink

    X is kept for wgrad: T*D elements instead of T/tp*D, which saves a second gather in backward. With `gathers_again`
    only x is kept, and X is gathered again when dw is computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        packed: Tensor,
        prepared: PreparedWeight | None,
        layers: Sequence[ColumnParallelLinear],
        comm: Communicator,
        *weights: Tensor,
    ) -> Tensor:
        tokens = comm.size * x.shape[0]
        matrix = prepared.forward if prepared else packed.T
        keep = not layers[0].gathers_again
        # Gather X and multiply it.
        (y,), full = gather_matmul(x, [matrix], comm, tokens, "all_gather_matmul", keep=keep)
        assert full is not None or not keep, "asked for"
        # Keep: the gathered tokens, or this rank's own with `gathers_again`.
        ctx.save_for_backward(x if full is None else full, packed)
        ctx.layers, ctx.comm, ctx.prepared, ctx.is_whole = layers, comm, prepared, full is not None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("a column-parallel layer")
        kept, packed = ctx.saved_tensors
        layers, comm, is_whole, sink = ctx.layers, ctx.comm, ctx.is_whole, ctx.layers[0].sink
        # One dy_i per layer; frozen layers get no weight gradient.
        pieces = dy.split([layer.weight.shape[0] for layer in layers], dim=1)
        pairs = [
            (layer.weight, piece, layer.replicas)
            for layer, piece in zip(layers, pieces, strict=True)
            if layer.weight.requires_grad
        ]
        # dgrad. If wgrad needs X now and it is not kept, X is gathered meanwhile.
        dx = None
        if ctx.needs_input_grad[0]:
            terms = [(dy, ctx.prepared.dgrad if ctx.prepared else packed)]
            if is_whole or sink.defers or not pairs:
                dx = matmul_scatter(terms, comm, "all_gather_matmul")
            else:
                dx, kept = scatter_and_gather(terms, kept, comm, len(dy), "all_gather_matmul")
                is_whole = True
        # wgrad, now or in the weight half: the sink decides.
        if pairs:
            sink.weight_grads(pairs, kept, gather_x=None if is_whole else comm)
        return (dx, None, None, None, None) + (None,) * len(pieces)


class _RowParallel(torch.autograd.Function):
    """Local shapes: x[T, F/tp], w[D, F/tp], y[T/tp, D].

    forward:  y = reduce_scatter(x @ w.T)
    dgrad:    dx = all_gather(dy) @ w                  its dual
    wgrad:    dw = DY.T @ x, DY = all_gather(dy)       into the sink

    Both use the same DY. If dw is computed later, DY is kept until then, or with `gathers_again` gathered once more.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Parameter, prepared: PreparedWeight | None, layer: RowParallelLinear
    ) -> Tensor:
        comm = layer.comm
        ctx.save_for_backward(x, weight)
        ctx.comm, ctx.sink, ctx.parameter, ctx.prepared = comm, layer.sink, weight, prepared
        ctx.gathers_again = layer.gathers_again
        matrix = prepared.forward if prepared else weight.T
        return matmul_scatter([(x, matrix)], comm, "matmul_reduce_scatter")

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("a row-parallel layer")
        x, weight = ctx.saved_tensors
        matrix = ctx.prepared.dgrad if ctx.prepared else weight
        matrices = [matrix] if ctx.needs_input_grad[0] else []
        parameter, comm, sink = ctx.parameter, ctx.comm, ctx.sink
        keep = parameter.requires_grad and not (sink.defers and ctx.gathers_again)
        # Gather DY; dgrad where x needs it.
        dxs, full = gather_matmul(dy, matrices, comm, x.shape[0], "matmul_reduce_scatter", keep=keep)
        if parameter.requires_grad:
            # wgrad, now or in the weight half. Keep either DY or dy until then, not both.
            kept, gather = (dy, comm) if full is None else (full, None)
            sink.weight_grads([(parameter, kept, None)], x, gather_dy=gather)
        return dxs[0] if dxs else None, None, None, None


def _is_traceable(layers: Sequence[ColumnParallelLinear | RowParallelLinear]) -> bool:
    """Return whether torch.compile is tracing and the registered operators can replace these layers' Functions.

    The operators give weight gradients to autograd, which accumulates them as ParamGradSink does; they sum none over
    replicas.
    """
    return torch.compiler.is_compiling() and all(
        isinstance(layer.sink, ParamGradSink)
        and getattr(layer, "replicas", None) is None
        # Not a shard's layer (model/exact.py): operators find a communicator by name, and a ShardCommunicator has none.
        and (layer.comm.size == 1 or layer.comm.group is not None)
        for layer in layers
    )


def _check_gather(x: Tensor, weights: Sequence[Tensor], comm: Communicator) -> None:
    """Raise ValueError unless x[T/tp, D] fits the weights; over an arena the other ranks raise too."""
    if problem := gather_problem(x, weights, None, comm, comm.size * len(x)):
        comm.refuse(x, problem)


def check_tokens(num_tokens: int, num_ranks: int, kind: str = "tp") -> None:
    """Raise ValueError unless the number of tokens is divisible by the number of ranks."""
    if num_tokens % num_ranks:
        raise ValueError(
            f"the number of tokens must be divisible by {kind}: {num_tokens} tokens, {kind} {num_ranks}: "
            f"pad to {-(-num_tokens // num_ranks) * num_ranks}"
        )


def check_divides(what: str, size: int, shards: int) -> int:
    """Return size / shards; raise ValueError unless it is whole."""
    if size % shards:
        down, up = size // shards * shards, (size // shards + 1) * shards
        nearest = f"{down} or {up}" if down else str(up)
        raise ValueError(f"{what} {size} is not divisible by {shards} shards: use {nearest}")
    return size // shards


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
        return _with_biases(self._product(x), (self,))

    def _product(self, x: Tensor) -> Tensor:
        if _is_traceable((self,)):
            return all_gather_matmul(x, (self.weight,), self.comm)[0]
        prepared = self._prepared and self._prepared.for_product(x, (self.weight,))
        if prepared is None:
            _check_gather(x, (self.weight,), self.comm)
        y: Tensor = applied(_ColumnParallel, x, self.weight.detach(), prepared, (self,), self.comm, self.weight)
        return y

    def prepare(self, num_tokens: int) -> None:
        """Copy the weight into the layout that its matmuls read fastest; the copies are used until the weight changes.

        Args:
            num_tokens: T of the matmuls that follow, over all ranks.

        Cost: memory of two copies of the weight, until `release`.
        """
        self._prepared = PreparedWeight(self.weight.detach(), num_tokens // self.comm.num_row_parts, (self.weight,))

    def release(self) -> None:
        """Free the prepared copies."""
        self._prepared = None


def _with_biases(y: Tensor, layers: Sequence[ColumnParallelLinear]) -> Tensor:
    """Add the layers' biases, of all or of none, to their products y[T, F/tp], side by side."""
    biases = [(layer.bias, layer.replicas) for layer in layers if layer.bias is not None]
    return add_cut_bias(y, biases, layers[0].sink) if biases else y


class PackedWeights:
    """Keeps the weights of several column-parallel layers in one contiguous storage, read by one GEMM.

    The layers' parameters are views of the storage and stay separate parameters. `module.to`,
    `load_state_dict(assign=True)` and `copy.deepcopy` give a parameter other memory: the next forward notices that by
    the address, and packs again. A weight that is borrowed, or a part of somebody's larger memory, stays where it is:
    the storage holds a copy of it, which is renewed when the weight has changed. If such weights lie behind each other,
    they are the storage.

    Args:
        layers: column-parallel layers of one input size, over equal communicators and with equal sinks.
    """

    def __init__(self, *layers: ColumnParallelLinear) -> None:
        self.layers = layers
        # Those of whose weights the storage has copies.
        self._copies: list[ColumnParallelLinear] = []
        self._storage = self._pack()
        self._copied: list[tuple[int, int]] = []
        self._prepared: PreparedWeight | None = None

    def prepare(self, num_tokens: int) -> None:
        """Prepare the packed weights as one matrix: see ColumnParallelLinear.prepare."""
        weights = [layer.weight for layer in self.layers]
        self._update(weights)
        self._prepared = PreparedWeight(self._storage, num_tokens // self.layers[0].comm.num_row_parts, weights)

    def release(self) -> None:
        """Free the prepared copies. The next forward copies weights again that are copied, even if autograd saw no
        write.
        """
        self._prepared, self._copied = None, []

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map x[T/tp, D] to (y_0[T, F_0/tp], y_1[T, F_1/tp], ...) with one gather and one GEMM."""
        if _is_traceable(self.layers) and self.layers[0].bias is None:
            return all_gather_matmul(x, [layer.weight for layer in self.layers], self.layers[0].comm)
        return self.forward_packed(x).split([layer.weight.shape[0] for layer in self.layers], dim=1)

    def forward_packed(self, x: Tensor) -> Tensor:
        """Map x[T/tp, D] to (y_0, y_1, ...)[T, F/tp], side by side in one tensor."""
        return _with_biases(self._product(x), self.layers)

    def _product(self, x: Tensor) -> Tensor:
        weights = [layer.weight for layer in self.layers]
        if _is_traceable(self.layers):
            return torch.cat(all_gather_matmul(x, weights, self.layers[0].comm), dim=1)
        comm = self.layers[0].comm
        prepared = self._prepared and self._prepared.for_product(x, weights)
        if prepared is None:
            _check_gather(x, weights, comm)
            self._update(weights)
        y: Tensor = applied(_ColumnParallel, x, self._storage, prepared, self.layers, comm, *weights)
        return y

    def _update(self, weights: Sequence[Tensor]) -> None:
        """Make the storage hold the weights as they are now."""
        if not self._is_packed(weights):
            self._storage = self._found_packed()
        copied = contents_of([layer.weight for layer in self._copies])
        if copied != self._copied:
            self._copy()
        self._copied = copied

    def adopt(self) -> None:
        """Let go of the storage if somebody has laid the weights out behind each other; they are the next one."""
        if _lie_side_by_side(self.layers):
            # They may have no memory yet.
            self._storage, self._copies = self._storage.new_empty(0), []

    def _found_packed(self) -> Tensor:
        """Return the weights as one tensor where they lie behind each other; else pack them."""
        if not _lie_side_by_side(self.layers):
            return self._pack()
        self._copies = []
        first, width = self.layers[0].weight, self.layers[0].weight.shape[1]
        # `data`: what writes to that memory, as a gather of weights, does not count as a write to this tensor.
        return first.data.as_strided((sum(len(layer.weight) for layer in self.layers), width), (width, 1))

    def _is_packed(self, weights: Sequence[Tensor]) -> bool:
        address = self._storage.data_ptr()
        for layer, weight in zip(self.layers, weights, strict=True):
            if (weight.data_ptr() != address and layer not in self._copies) or weight.dtype != self._storage.dtype:
                return False
            address += weight.numel() * weight.element_size()
        return True

    @torch.no_grad()
    def _pack(self) -> Tensor:
        storage = torch.cat([layer.weight.detach() for layer in self.layers])
        self._copies = [layer for layer in self.layers if layer.borrows or _is_part_of_more(layer, self.layers)]
        pieces = storage.split([layer.weight.shape[0] for layer in self.layers])
        for layer, piece in zip(self.layers, pieces, strict=True):
            if layer not in self._copies:
                layer.weight.data = piece
        return storage

    @torch.no_grad()
    def _copy(self) -> None:
        pieces = self._storage.split([layer.weight.shape[0] for layer in self.layers])
        # What backward still needs of the storage it needs with these values: within a step they stay the same.
        with _unsafe_preserve_version_counter(self._storage):
            for layer, piece in zip(self.layers, pieces, strict=True):
                if layer in self._copies:
                    piece.copy_(layer.weight)


def _is_part_of_more(layer: ColumnParallelLinear, packed: Sequence[ColumnParallelLinear]) -> bool:
    """Whether a layer's weight lies in memory that holds more than the weights that are packed with it."""
    memory = layer.weight.untyped_storage()
    neighbours = [other.weight for other in packed if other.weight.untyped_storage().data_ptr() == memory.data_ptr()]
    return memory.nbytes() > sum(weight.numel() * weight.element_size() for weight in neighbours)


def adopt_moved_weights(model: nn.Module) -> None:
    """Let the packed layers of a model take their weights where they lie now: see PackedWeights.adopt."""
    for module in model.modules():
        for part in vars(module).values():
            if isinstance(part, PackedWeights):
                part.adopt()


def _lie_side_by_side(layers: Sequence[ColumnParallelLinear]) -> bool:
    """Whether somebody has laid the layers' weights out behind each other in one memory."""
    first = layers[0].weight
    place = first.storage_offset()
    for layer in layers:
        weight = layer.weight
        # By identity: memory that has been taken away has no address.
        is_next = weight.untyped_storage()._cdata == first.untyped_storage()._cdata
        if layer.borrows or not is_next or weight.storage_offset() != place or weight.dtype != first.dtype:
            return False
        place += weight.numel()
    return True


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
            return y + self.bias
        return add_whole_bias(y, self.bias, self.comm, sinks)

    def _product(self, x: Tensor) -> Tensor:
        check_tokens(x.shape[0], self.comm.num_row_parts)
        if _is_traceable((self,)):
            return matmul_reduce_scatter(x, self.weight, self.comm)
        prepared = self._prepared and self._prepared.for_product(x, (self.weight,))
        if prepared is None and (problem := matmul_problem("matmul_reduce_scatter", x, self.weight, None)):
            self.comm.refuse(x, problem)
        y: Tensor = applied(_RowParallel, x, self.weight, prepared, self)
        return y

    def prepare(self, num_tokens: int) -> None:
        """Prepare the weight: see ColumnParallelLinear.prepare."""
        self._prepared = PreparedWeight(self.weight.detach(), num_tokens // self.comm.num_row_parts, (self.weight,))

    def release(self) -> None:
        """Free the prepared copies."""
        self._prepared = None
