"""The way of a column-parallel product: the layer, weights that share one product, and the Function that it is.

    y[T, F/tp] = all_gather_tp(x[T/tp, D]) @ w[F/tp, D].T

Read `_column_product` first. Several weights share one gather and one GEMM where they lie behind each other in one
storage (PackedWeights). They remain separate parameters: a fused [q; k; v] shard, loaded at another tp, would have the
right shape and permuted rows, and nothing would fail. The dual, a row-parallel product, is in row.py.

Weight gradients go to a sink, which may leave them to autograd (gradient_sink.py). Under autocast a product multiplies
a copy of the weight, but the gradient is the weight's own: a sink knows parameters, and sums over ranks in their dtype.
torch.compile cannot trace sinks: with the default sink it is given the registered operators.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from tpkernels.autocast import lowered
from tpkernels.derivatives import is_recorded, refuse_second_order
from tpkernels.exchange.communicator import Communicator
from tpkernels.fused.all_gather_matmul import all_gather_matmul, gather_problem
from tpkernels.fused.gather import gather_matmul
from tpkernels.fused.scatter import matmul_scatter, scatter_and_gather
from tpkernels.ops.activation import activation_backward
from tpkernels.ops.matmul.configs import MatmulConfig
from tpkernels.ops.matmul.swiglu import matmul_gated_forward
from tpkernels.ops.matmul.tuned import tuned_gate

from tpengine.layers.bias import add_cut_bias
from tpengine.layers.gradient_sink import Gradients, GradientSink, WeightTerm, check_reaches
from tpengine.layers.placement import Placement, check_divides, cut
from tpengine.layers.prepared_weights import PreparedWeight, as_one_matrix, lies_at, version_of


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
        place: where the weight's owner keeps it, if that is neither this layer nor another: see prepared_weights.py.
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
        self._packing: weakref.ref[PackedWeights] | None = None
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

    def pack_with(self, packing: PackedWeights) -> None:
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
        return _column_product(x, (self,), self._prepared, _alone)

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


class PackedWeights:
    """Keeps the weights of several column-parallel layers in one contiguous storage, read by one GEMM.

    The layers' parameters are views of the storage and stay separate parameters. They are laid out when this is made,
    and when the layers give them other memory (`module.to`, `load_state_dict(assign=True)`); a copy of this lays out
    the copied layers. At no other time is a weight moved, and never one that another layer or a buffer owns: see
    prepared_weights.py. Weights that do not lie behind each other are copied, anew for each product. If their owner has
    declared their places, one copy serves until `release`.

    Args:
        layers: column-parallel layers of one input size, over equal communicators and with equal sinks.
    """

    def __init__(self, *layers: ColumnParallelLinear) -> None:
        self.layers = layers
        self._copy: Tensor | None = None
        self._prepared: PreparedWeight | None = None
        for layer in layers:
            layer.pack_with(self)
        self.lay_out()

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedWeights, self.layers

    @torch.no_grad()
    def lay_out(self) -> None:
        """Lay the weights out that are the layers' own, once all of these have new memory of one dtype and device."""
        own = [layer for layer in self.layers if not layer.borrows and layer.place is None]
        weights = [layer.weight for layer in own]
        are_alike = len({(weight.dtype, weight.device) for weight in weights}) == 1
        if not are_alike or not all(layer.is_fresh and isinstance(layer.weight, Parameter) for layer in own):
            return
        # A model that was made or moved under inference_mode keeps weights that a backward can read.
        with torch.inference_mode(False):
            pieces = torch.cat([weight.detach() for weight in weights]).split([len(weight) for weight in weights])
            for layer, piece in zip(own, pieces, strict=True):
                layer.weight.data, layer.is_fresh = piece, False

    def prepare(self, num_tokens: int) -> None:
        """Prepare the packed weights as one matrix: see ColumnParallelLinear.prepare."""
        weights = [layer.weight for layer in self.layers]
        packed = self._packed(weights)
        self._prepared = PreparedWeight(packed, num_tokens // self.layers[0].comm.num_row_parts, weights)

    def release(self) -> None:
        """Free the prepared copies, and the copy of weights that their owner keeps apart. It may change them then."""
        self._prepared = self._copy = None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map x[T/tp, D] to (y_0[T, F_0/tp], y_1[T, F_1/tp], ...) with one gather and one GEMM."""
        if _are_traceable(self.layers) and self.layers[0].bias is None:
            return all_gather_matmul(x, [layer.weight for layer in self.layers], self.layers[0].comm)
        return self.forward_packed(x).split([layer.rows for layer in self.layers], dim=1)

    def forward_packed(self, x: Tensor, members: Sequence[nn.Module] = ()) -> Tensor:
        """Map x[T/tp, D] to (y_0, y_1, ...)[T, F/tp], side by side in one tensor.

        Args:
            x: this rank's tokens.
            members: what stands in the places of the layers now. If a layer has been replaced, or has hooks, each is
                called by itself, with a gather of its own: a packed product calls none of them.
        """
        if _are_called_alone(members or self.layers, self.layers):
            return torch.cat([member(x) for member in members or self.layers], dim=1)
        return _column_product(x, self.layers, self._prepared, self._packed)

    def forward_gated(self, x: Tensor, members: Sequence[nn.Module], kind: str) -> Tensor | None:
        """Return h[T, F] = act(g) * u of the packed product (g, u), by one kernel; None where it is to be made apart.

        It is one kernel where a file of this kind of GPU says that this was timed to be faster (tpkernels' tuned.py),
        without biases.

        Args:
            x: all tokens, on one rank.
            members: as forward_packed.
            kind: act: silu, gelu or gelu_tanh.
        """
        if self.layers[0].bias is not None or torch.compiler.is_compiling():
            return None
        weights: list[Tensor] = [layer.weight for layer in self.layers]
        x, *operands = lowered(x, *weights)
        tuned = tuned_gate(x, len(weights[0]), kind)
        if tuned is None or tuned.apart_us <= tuned.us or _are_called_alone(members, self.layers):
            return None
        _check(x, operands, self.layers, weights)
        packed = self._packed(operands)
        if not is_recorded():
            return matmul_gated_forward(x, packed, kind, False, False, tuned.config)[0]
        keeps = torch.is_grad_enabled() and any(of.requires_grad for of in (x, *weights))
        epilogue = Epilogue(kind, tuned.config, keeps)
        h: Tensor = _GatedColumnParallel.apply(x, packed, epilogue, self.layers, *weights)
        return h

    def _packed(self, weights: Sequence[Tensor]) -> Tensor:
        """Return the weights behind each other, as they are now."""
        if (matrix := as_one_matrix(weights)) is not None:
            return matrix
        places = [layer.place for layer in self.layers]
        is_told = all(place is not None and lies_at(w, place) for place, w in zip(places, weights, strict=True))
        if is_told and self._copy is not None:
            return self._copy
        # Not an inference tensor, whatever the mode: a backward may read the copy later.
        with torch.inference_mode(False), torch.no_grad():
            copy = torch.cat([weight.detach() for weight in weights])
        if is_told:
            self._copy = copy
        return copy


def _column_product(
    x: Tensor,
    layers: Sequence[ColumnParallelLinear],
    prepared: PreparedWeight | None,
    packed: Callable[[Sequence[Tensor]], Tensor],
) -> Tensor:
    """Return y[T, F/tp] = all_gather_tp(x[T/tp, D]) @ w.T + b, the layers' outputs side by side.

    Args:
        x: this rank's rows.
        layers: whose weights and biases these are.
        prepared: w[F/tp, D], the weights behind each other, in the forms that products read fastest, or None.
        packed: makes w of the weights, in x's dtype, without a gradient of its own.

    Raises:
        ValueError: x does not fit; or a weight is computed or hooked, and the layers' sink would not reach it.
    """
    # A weight may be computed: read it once. It gets the gradient, also where autocast multiplies a copy.
    weights: list[Tensor] = [layer.weight for layer in layers]
    comm = layers[0].comm
    if _are_traceable(layers):
        outputs = all_gather_matmul(x, weights, comm)
        return _with_biases(outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), layers)
    x, *operands = lowered(x, *weights)
    prepared = prepared and prepared.for_product(x, weights)
    _check(None if prepared else x, operands, layers, weights)
    matrix = prepared.matrix if prepared else packed(operands)
    if is_recorded():
        y: Tensor = _ColumnParallel.apply(x, matrix, prepared, layers, *weights)
    else:
        operand, keep = prepared.forward if prepared else matrix.T, not layers[0].gathers_again
        (y,), _ = gather_matmul(x, [operand], comm, comm.size * x.shape[0], "all_gather_matmul", keep=keep)
    return _with_biases(y, layers)


class _ColumnParallel(torch.autograd.Function):
    """Local shapes: x[T/tp, D], w = (w_0, w_1, ...)[F/tp, D], y = (y_0, y_1, ...)[T, F/tp].

    forward:  y = all_gather(x) @ w.T                  one gather, one matmul on the packed weights
    dgrad:    dx = reduce_scatter(dy @ w)              its dual
    wgrad:    dw_i = dy_i.T @ X, X = all_gather(x)     into the sink, which may make one matmul of several

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
        *weights: Tensor,
    ) -> Tensor:
        comm = layers[0].comm
        tokens = comm.size * x.shape[0]
        matrix = prepared.forward if prepared else packed.T
        keep = not layers[0].gathers_again
        # Gather X and multiply it.
        (y,), full = gather_matmul(x, [matrix], comm, tokens, "all_gather_matmul", keep=keep)
        assert full is not None or not keep, "asked for"
        # Keep: the gathered tokens, or this rank's own with `gathers_again`.
        ctx.save_for_backward(x if full is None else full, packed)
        ctx.layers, ctx.prepared, ctx.is_whole, ctx.weights = layers, prepared, full is not None, weights
        ctx.versions = _versions_of(packed, weights)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("a column-parallel layer")
        return _ColumnParallel.gradients(ctx, dy, *ctx.saved_tensors)

    @staticmethod
    def gradients(ctx: Any, dy: Tensor, kept: Tensor, packed: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of forward's arguments."""
        layers, is_whole = ctx.layers, ctx.is_whole
        if ctx.versions not in (None, [version_of(weight) for weight in ctx.weights]):
            raise RuntimeError(
                "packed weights must stay as they are from forward to backward: one has been modified by an in-place "
                "operation in between: step, load and clamp after backward"
            )
        comm, sink = layers[0].comm, layers[0].sink
        # One dy_i per layer, side by side; frozen layers get no weight gradient.
        are_trained = ctx.needs_input_grad[4:]
        trained, first = [], 0
        for weight, layer, is_trained in zip(ctx.weights, layers, are_trained, strict=True):
            if is_trained:
                trained.append(WeightTerm(weight, first, layer.replicas))
            first += weight.shape[0]
        # dgrad. If wgrad needs X now and it is not kept, X is gathered meanwhile.
        dx = None
        if ctx.needs_input_grad[0]:
            terms = [(dy, ctx.prepared.dgrad if ctx.prepared else packed)]
            if is_whole or sink.defers or not trained:
                dx = matmul_scatter(terms, comm, "all_gather_matmul")
            else:
                dx, kept = scatter_and_gather(terms, kept, comm, len(dy), "all_gather_matmul")
                is_whole = True
        # wgrad, now or in the weight half: the sink decides.
        dws: Gradients = sink.weight_grads(trained, dy, kept, gather_x=None if is_whole else comm) if trained else ()
        left = iter(dws)
        return (dx, None, None, None, *(next(left) if is_trained else None for is_trained in are_trained))


class Epilogue(NamedTuple):
    """What a gated product does before it stores: the activation's kind, the tile, and whether y is stored too."""

    kind: str
    config: MatmulConfig
    keeps_y: bool


class _GatedColumnParallel(torch.autograd.Function):
    """Local shapes: x[T, D], w = (w_gate, w_up)[F, D], y = (g, u)[T, 2F], h[T, F]; one rank has all tokens and columns.

    forward:  h = act(g) * u, (g, u) = x @ w.T         one kernel, the activation in its epilogue
    dgrad:    dy of dh and y by the activation's kernel, then as _ColumnParallel
    wgrad:    as _ColumnParallel

    x and y are kept, as the product and the activation keep them apart. h is made of g and u before they are rounded.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        packed: Tensor,
        epilogue: Epilogue,
        layers: Sequence[ColumnParallelLinear],
        *weights: Tensor,
    ) -> Tensor:
        kind, config, keeps = epilogue
        h, y = matmul_gated_forward(x, packed, kind, keeps, False, config)
        ctx.save_for_backward(x, packed, y)
        ctx.layers, ctx.prepared, ctx.is_whole, ctx.weights, ctx.kind = layers, None, True, weights, kind
        ctx.versions = _versions_of(packed, weights)
        return h

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("a gated column-parallel layer")
        x, packed, y = ctx.saved_tensors
        return _ColumnParallel.gradients(ctx, activation_backward(dh, y, ctx.kind, True), x, packed)


def _versions_of(packed: Tensor, weights: Sequence[Tensor]) -> list[int | None] | None:
    """Return how often the weights were written to, which autograd counts; None if packed is a copy of them.

    Of packed itself it counts nothing: it is another view of the weights' memory.
    """
    return [version_of(weight) for weight in weights] if packed.data_ptr() == weights[0].data_ptr() else None


def is_traceable(sink: GradientSink, comm: Communicator) -> bool:
    """Return whether torch.compile is tracing and a registered operator can replace a layer's Function.

    The operators give weight gradients to autograd, as its sink would.
    """
    return (
        torch.compiler.is_compiling()
        and sink.is_autograds
        # Not a shard's layer (model/exact.py): operators find a communicator by name, and a ShardCommunicator has none.
        and (comm.size == 1 or comm.group is not None)
    )


def _are_traceable(layers: Sequence[ColumnParallelLinear]) -> bool:
    """Return whether an operator can replace a product of these layers: it sums no gradients over replicas."""
    first = layers[0]
    return is_traceable(first.sink, first.comm) and all(layer.replicas is None for layer in layers)


def _check(
    x: Tensor | None, operands: Sequence[Tensor], layers: Sequence[ColumnParallelLinear], weights: Sequence[Tensor]
) -> None:
    """Raise ValueError unless x[T/tp, D] fits (over an arena the other ranks raise too), and the sink reaches all.

    Args:
        x: None if it is known to fit.
    """
    comm = layers[0].comm
    if x is not None and (problem := gather_problem(x, operands, None, comm, comm.size * len(x))):
        comm.refuse(x, problem)
    for weight in weights:
        check_reaches(layers[0].sink, weight, "a column-parallel weight")


def _alone(weights: Sequence[Tensor]) -> Tensor:
    """Return the one weight of a layer that is not packed."""
    return weights[0].detach()


def _with_biases(y: Tensor, layers: Sequence[ColumnParallelLinear]) -> Tensor:
    """Add the layers' biases, of all or of none, to their products y[T, F/tp], side by side."""
    biases = []
    # A loop: torch.compile cannot trace an assignment inside of a comprehension.
    for layer in layers:
        # A bias may be computed: read it once.
        bias = layer.bias
        if bias is not None:
            biases.append((bias, layer.replicas))
    return add_cut_bias(y, biases, layers[0].sink) if biases else y


def _are_called_alone(members: Sequence[nn.Module], layers: Sequence[nn.Module]) -> bool:
    for member, layer in zip(members, layers, strict=True):
        hooks = member._forward_hooks or member._forward_pre_hooks or member._backward_hooks
        if member is not layer or hooks or member._backward_pre_hooks:
            return True
    return False


def declare_places(model: nn.Module, places: Mapping[Tensor, Tensor]) -> None:
    """Tell a model's column-parallel layers that somebody else owns the memory of their weights from now on.

    The owner calls `release` when it has changed weights that it does not keep behind each other.

    Args:
        model: its layers may share weights.
        places: the part of the owner's memory in which each of its weights lies.
    """
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear) and module.weight in places:
            module.place = places[module.weight]
