"""Where weight gradients go: the sink protocol, the engine's sinks, and the sink for other models.

Matmul Functions return dx only. Their backward hands (param, x, dy) to a sink, which decides when and where the weight
gradient is computed. This has two advantages: where dtypes agree, the GEMM accumulates into the buffer without an
intermediate tensor; and a pipeline schedule may compute weight gradients later than dx. It has one price: weight
gradients are only a side effect of backward. `torch.autograd.grad` cannot return them; it returns dx, and accumulates
them too.

`ParamGradSink` adds to `param.grad` at once, as torch would. It is the default of every layer, so that the layers work
in any model under any optimizer. `BufferSink` accumulates into the flat buffers of the engine. `DeferringSink` wraps
another sink and lets a schedule run the weight half of a backward pass later than its input half.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import Parameter
from tpkernels.launch import accumulation_dtype as accumulation_dtype
from tpkernels.ops.embedding import add_rows_
from tpkernels.ops.matmul.wgrad import accumulate_wgrad

from tpengine.layers.collectives import Communicator

WeightPairs = Sequence[tuple[Parameter, Tensor, Communicator | None]]


@runtime_checkable
class GradientSink(Protocol):
    """Takes the weight gradients of one backward pass.

    `defers` tells a layer that this backward pass is an input half: what the layer gives now is added later. A layer
    that would gather a tensor only for its weight gradients then leaves that gather to `weight_grads`.

    `partial` names the ranks that hold the same parameter, each with only a part of its gradient's sum (norm weights:
    tp; replicated KV weights: the replicas). The owner of the sink takes the sum over them, at once or later.
    """

    @property
    def defers(self) -> bool:
        """Whether contributions are kept for the weight half."""

    def weight_grads(
        self,
        pairs: WeightPairs,
        x: Tensor,
        *,
        gather_x: Communicator | None = None,
        gather_dy: Communicator | None = None,
    ) -> None:
        """Add dw_i[out_i, in] = dy_i[T, out_i].T @ x[T, in] to each parameter's gradient, after one gather for all.

        Args:
            pairs: (parameter, dy_i, partial) of each weight that x is multiplied by.
            x: [T, in], or this rank's rows of it if `gather_x` is given.
            gather_x, gather_dy: the ranks over which to gather x, or each dy_i, before the product; None: it is whole.
        """

    def weight_grad(self, param: Parameter, x: Tensor, dy: Tensor, partial: Communicator | None = None) -> None:
        """Add dw[out, in] = dy[T, out].T @ x[T, in] to the gradient of `param`."""

    def add(self, param: Parameter, grad: Tensor, partial: Communicator | None = None) -> None:
        """Add a gradient that is already computed, of `param`'s shape, in the accumulation dtype."""

    def add_rows(self, param: Parameter, rows: Tensor, grad: Tensor) -> None:
        """Add grad[n, :] to row rows[n] of the gradient of `param`, for every n.

        Rows may repeat; those outside `param` are skipped.
        """


class _ImmediateSink:
    """A sink that adds each contribution as soon as it is given."""

    @property
    def defers(self) -> bool:
        """See GradientSink."""
        return False

    def weight_grads(
        self,
        pairs: WeightPairs,
        x: Tensor,
        *,
        gather_x: Communicator | None = None,
        gather_dy: Communicator | None = None,
    ) -> None:
        """See GradientSink."""
        full = x if gather_x is None else gather_x.all_gather(x)
        for param, dy, partial in pairs:
            self.weight_grad(param, full, dy if gather_dy is None else gather_dy.all_gather(dy.contiguous()), partial)

    def weight_grad(self, param: Parameter, x: Tensor, dy: Tensor, partial: Communicator | None = None) -> None:
        """See GradientSink."""
        raise NotImplementedError


class ParamGradSink(_ImmediateSink):
    """Accumulate into `param.grad` at once, in the parameter's dtype, and all-reduce partial sums at once.

    Cost: one all-reduce over `partial` per norm weight and micro-batch; the engine's sink leaves that sum to a bucket.
    """

    def weight_grad(self, param: Parameter, x: Tensor, dy: Tensor, partial: Communicator | None = None) -> None:
        self.add(param, dy.T @ x, partial)

    def add(self, param: Parameter, grad: Tensor, partial: Communicator | None = None) -> None:
        if partial is not None and partial.size > 1:
            # Summed over ranks in the wider dtype: under autocast a float32 parameter's product is in 16 bits.
            grad = partial.all_reduce_(grad.to(torch.promote_types(grad.dtype, param.dtype)).contiguous())
        _gradient_of(param).add_(grad)

    def add_rows(self, param: Parameter, rows: Tensor, grad: Tensor) -> None:
        add_rows_(_gradient_of(param), rows, grad.to(param.dtype))


class Buckets(Protocol):
    """Counts contributions to gradients: data_parallel.GradientBuckets."""

    def contributed(self, index: int) -> None:
        """Count one contribution to a gradient in bucket `index`, after it has been added."""


class BufferSink(_ImmediateSink):
    """Accumulate into the gradient buckets, which count contributions.

    `partial` is ignored here. The bucket that holds the parameter is later summed over data-parallel ranks and those
    ranks together (parameters.ParameterSpec.reduce_over).
    """

    def __init__(self) -> None:
        self._places: dict[Parameter, tuple[Tensor, int]] = {}
        self._buckets: Buckets

    def __deepcopy__(self, memo: object) -> ParamGradSink:
        """Return a ParamGradSink: the buffers belong to the original module, not to its copy."""
        return ParamGradSink()

    def attach(self, places: Mapping[Parameter, tuple[Tensor, int]], buckets: Buckets) -> None:
        """Say where each parameter's gradient goes.

        Args:
            places: parameter -> (tensor of its shape in the accumulation dtype, zeroed by its owner; its bucket).
            buckets: told of each contribution.
        """
        self._places, self._buckets = dict(places), buckets

    def weight_grad(self, param: Parameter, x: Tensor, dy: Tensor, partial: Communicator | None = None) -> None:
        buffer, bucket = self._places[param]
        accumulate_wgrad(buffer, dy, x)
        self._buckets.contributed(bucket)

    def add(self, param: Parameter, grad: Tensor, partial: Communicator | None = None) -> None:
        buffer, bucket = self._places[param]
        buffer.add_(grad)
        self._buckets.contributed(bucket)

    def add_rows(self, param: Parameter, rows: Tensor, grad: Tensor) -> None:
        buffer, bucket = self._places[param]
        add_rows_(buffer, rows, grad)
        self._buckets.contributed(bucket)


class WeightHalves:
    """Contributions to weight gradients, kept from the input half of a backward pass (I) to its weight half (W).

    Memory: from I to W, the operands of each contribution: a layer's input and the gradient of its output.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._open: list[Callable[[], None]] | None = None

    @property
    def is_open(self) -> bool:
        """Whether an input half is running."""
        return self._open is not None

    def add(self, contribute: Callable[[], None]) -> None:
        """Keep a contribution of the running input half."""
        assert self._open is not None, "no input half is running"
        self._open.append(contribute)

    @contextmanager
    def of(self, piece: tuple[int, int]) -> Iterator[None]:
        """Keep what is contributed inside the context, for `run` of the same (chunk, micro-batch)."""
        assert self._open is None, "one input half runs at a time"
        self._open = self._waiting[piece] = []
        try:
            yield
        finally:
            self._open = None

    @torch.no_grad()
    def run(self, piece: tuple[int, int]) -> None:
        """Add what the input half of (chunk, micro-batch) contributed, in the same order, and free it."""
        waiting = self._waiting.pop(piece)
        waiting.reverse()
        while waiting:
            # Popped before it runs, so that its operands are freed as soon as the product has been added.
            waiting.pop()()


class DeferringSink:
    """Passes contributions to another sink: at once, or, while an input half runs, in its weight half.

    Those of norms and embeddings are deferred too. So each parameter's sum is taken in the order of the micro-batches'
    weight halves, and its bits do not depend on the schedule.

    Args:
        inner: receives the contributions.
        halves: keeps the deferred ones; shared by all sinks of a rank.
    """

    def __init__(self, inner: GradientSink, halves: WeightHalves) -> None:
        self.inner, self.halves = inner, halves

    def __deepcopy__(self, memo: object) -> ParamGradSink:
        """Return a ParamGradSink, as BufferSink does: no schedule runs the weight halves of a copy."""
        return ParamGradSink()

    @property
    def defers(self) -> bool:
        """See GradientSink."""
        return self.halves.is_open

    def weight_grads(
        self,
        pairs: WeightPairs,
        x: Tensor,
        *,
        gather_x: Communicator | None = None,
        gather_dy: Communicator | None = None,
    ) -> None:
        """See GradientSink."""
        # Not through _now_or_later, to save a call: nearly all weight gradients come this way.
        if self.halves.is_open:
            self.halves.add(
                functools.partial(self.inner.weight_grads, pairs, x, gather_x=gather_x, gather_dy=gather_dy)
            )
        else:
            self.inner.weight_grads(pairs, x, gather_x=gather_x, gather_dy=gather_dy)

    def weight_grad(self, param: Parameter, x: Tensor, dy: Tensor, partial: Communicator | None = None) -> None:
        """See GradientSink."""
        self._now_or_later(self.inner.weight_grad, param, x, dy, partial)

    def add(self, param: Parameter, grad: Tensor, partial: Communicator | None = None) -> None:
        """See GradientSink."""
        self._now_or_later(self.inner.add, param, grad, partial)

    def add_rows(self, param: Parameter, rows: Tensor, grad: Tensor) -> None:
        """See GradientSink."""
        self._now_or_later(self.inner.add_rows, param, rows, grad)

    def _now_or_later(self, contribute: Callable[..., None], *args: Any) -> None:
        if self.halves.is_open:
            self.halves.add(functools.partial(contribute, *args))
        else:
            contribute(*args)


def _gradient_of(param: Parameter) -> Tensor:
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad
