"""The differentiable products of column- and row-parallel layers, fused with their communication.

    column:  y[T, F/tp] = all_gather_tp(x[T/tp, D]) @ w[F/tp, D].T
    row:     y[T/tp, D] = reduce_scatter_tp(x[T, F/tp] @ w[D, F/tp].T)

Each is the other's dual: the backward of the gather is a reduce-scatter, and the other way round. Several
column-parallel weights share one gather and one GEMM when their storage is packed (packed.py). Weight gradients go to a
sink, which may leave them to autograd (gradient_sink.py). Under autocast a product multiplies a copy of the weight, but
the gradient is the weight's own: a sink knows parameters, and sums over ranks in their dtype. torch.compile
cannot trace sinks: with the default sink it is
given the registered operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from tpkernels.derivatives import applied, refuse_second_order
from tpkernels.fused.all_gather_matmul import gather_problem
from tpkernels.fused.exchange_matmul import gather_matmul, matmul_scatter, scatter_and_gather
from tpkernels.ops.activation import activation_backward
from tpkernels.ops.matmul.configs import MatmulConfig
from tpkernels.ops.matmul.swiglu import matmul_gated_forward

from tpengine.layers.collectives import Communicator
from tpengine.layers.gradient_sink import Gradients, GradientSink, WeightTerm, check_reaches
from tpengine.layers.linear.prepared import PreparedWeight, version_of


class LinearLayer(Protocol):
    """What a product needs of its layer.

    Attributes:
        comm: the tp ranks.
        weight: w.
        sink: where the weight gradient goes.
        gathers_again: whether what backward needs whole is gathered again there instead of kept.
        replicas: the ranks that hold the same shard of a column-parallel weight, or None.
    """

    comm: Communicator
    weight: Parameter
    sink: GradientSink
    gathers_again: bool
    replicas: Communicator | None


class Epilogue(NamedTuple):
    """What a gated product does before it stores: the activation's kind, the tile, and whether y is stored too."""

    kind: str
    config: MatmulConfig
    keeps_y: bool


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
        layers: Sequence[LinearLayer],
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
        layers: Sequence[LinearLayer],
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
        layer: LinearLayer,
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


def is_traceable(layers: Sequence[LinearLayer]) -> bool:
    """Return whether torch.compile is tracing and the registered operators can replace these layers' Functions.

    The operators give weight gradients to autograd, as its sink would; they sum none over replicas.
    """
    return torch.compiler.is_compiling() and all(
        layer.sink.is_autograds
        and layer.replicas is None
        # Not a shard's layer (model/exact.py): operators find a communicator by name, and a ShardCommunicator has none.
        and (layer.comm.size == 1 or layer.comm.group is not None)
        for layer in layers
    )


def check_gather(x: Tensor, weights: Sequence[Tensor], comm: Communicator) -> None:
    """Raise ValueError unless x[T/tp, D] fits the weights; over an arena the other ranks raise too."""
    if problem := gather_problem(x, weights, None, comm, comm.size * len(x)):
        comm.refuse(x, problem)


def column_product(
    x: Tensor,
    packed: Tensor,
    prepared: PreparedWeight | None,
    layers: Sequence[LinearLayer],
    weights: Sequence[Tensor],
) -> Tensor:
    """Return y[T, F/tp] = all_gather_tp(x[T/tp, D]) @ w.T. Its callers have checked that x fits.

    Args:
        x: this rank's rows.
        packed: w[F/tp, D], the layers' weights behind each other in x's dtype, without a gradient of its own.
        prepared: the same, in the forms that products read fastest, or None.
        layers: whose weights these are.
        weights: the same as the layers hold them: read once per call, since a read may compute them. They get the
            gradients, also where autocast multiplies a copy.

    Raises:
        ValueError: a weight is computed or hooked, and the layers' sink would not reach it.
    """
    for weight in weights:
        check_reaches(layers[0].sink, weight, "a column-parallel weight")
    y: Tensor = applied(_ColumnParallel, x, packed, prepared, layers, *weights)
    return y


def gated_product(
    x: Tensor, packed: Tensor, kind: str, config: MatmulConfig, layers: Sequence[LinearLayer], weights: Sequence[Tensor]
) -> Tensor:
    """Return h[T, F] = act(g) * u, (g, u) = x[T, D] @ w[2F, D].T, by one kernel. Its callers have checked that x fits.

    Args:
        x, packed, layers, weights: as column_product, of gate and up, on one rank.
        kind: act: silu, gelu or gelu_tanh.
        config: the tile that was tuned.

    Raises:
        ValueError: as column_product.
    """
    for weight in weights:
        check_reaches(layers[0].sink, weight, "a column-parallel weight")
    keeps = torch.is_grad_enabled() and any(of.requires_grad for of in (x, *weights))
    h: Tensor = applied(_GatedColumnParallel, x, packed, Epilogue(kind, config, keeps), layers, *weights)
    return h


def row_product(
    x: Tensor, weight: Tensor, operand: Tensor, prepared: PreparedWeight | None, layer: LinearLayer
) -> Tensor:
    """Return y[T/tp, D] = reduce_scatter_tp(x[T, F/tp] @ w[D, F/tp].T). Its caller has checked that x fits.

    Args:
        x: all rows, this rank's columns.
        weight: w as the layer holds it, read once per call. It gets the gradient.
        operand: w in x's dtype: the same tensor, or autocast's copy.
        prepared: w in the forms that products read fastest, or None.
        layer: whose weight w is.

    Raises:
        ValueError: as column_product.
    """
    check_reaches(layer.sink, weight, "a row-parallel weight")
    converted = None if operand is weight else operand.detach()
    y: Tensor = applied(_RowParallel, x, weight, converted, prepared, layer)
    return y
