"""Where weight gradients go: the sink protocol, and the sink for models outside the engine.

Matmul Functions return dx only; their backward hands (param, x, dy) to a sink, which decides when and where the
weight gradient is computed. Two consequences: where dtypes agree the GEMM itself accumulates into the buffer, without
an intermediate tensor, and a pipeline schedule may compute weight gradients later than dx. One price: they exist only
as a side effect of backward, so `torch.autograd.grad` cannot return them (it returns dx, and accumulates them too).

`ParamGradSink` puts them into `param.grad` at once, as torch would; it is the default of every layer, so that the
layers work in anybody's model under any optimizer. `BufferSink` accumulates into the flat buffers of the engine;
`DeferringSink` before another sink lets a schedule run the weight half of a backward pass later than its input half.
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

    `defers` tells a layer that this backward is an input half, and that what it gives now is added later: a layer that
    would have to gather something for its weight gradients alone then leaves the gather to `weight_grads`.

    `partial` names the ranks that hold the same parameter and each only a part of its gradient's sum (norm weights:
    tp; replicated KV weights: the replicas). Whoever owns the sink sees that the sum over them is taken, now or
    later.
    """

    @property
    def defers(self) -> bool:
        """Whether contributions wait for the weight half."""

    def weight_grads(
        self,
        pairs: WeightPairs,
        x: Tensor,
        *,
        gather_x: Communicator | None = None,
        gather_dy: Communicator | None = None,
    ) -> None:
        """Add dw_i[out_i, in] = dy_i[T, out_i].T @ x[T, in] to the gradient of each parameter; one gather for all.

        Args:
            pairs: (parameter, dy_i, partial), which share x.
            x: [T, in], or this rank's rows of it if `gather_x` is given.
            gather_x, gather_dy: the ranks over which x or the dy_i are still to be gathered when the sum is taken.
        """

    def weight_grad(self, param: Parameter, x: Tensor, dy: Tensor, partial: Communicator | None = None) -> None:
        """Add dw[out, in] = dy[T, out].T @ x[T, in] to the gradient of `param`."""

    def add(self, param: Parameter, grad: Tensor, partial: Communicator | None = None) -> None:
        """Add a gradient that is already computed, of `param`'s shape, in the accumulation dtype."""

    def add_rows(self, param: Parameter, rows: Tensor, grad: Tensor) -> None:
        """Add grad[n, :] to row rows[n] of the gradient of `param`, for every n whose row it has (rows may repeat)."""


class _ImmediateSink:
    """A sink that adds at once."""

    @property
    def defers(self) -> bool:
        """As GradientSink."""
        return False

    def weight_grads(
        self,
        pairs: WeightPairs,
        x: Tensor,
        *,
        gather_x: Communicator | None = None,
        gather_dy: Communicator | None = None,
    ) -> None:
        """As GradientSink."""
        full = x if gather_x is None else gather_x.all_gather(x)
        for param, dy, partial in pairs:
            self.weight_grad(param, full, dy if gather_dy is None else gather_dy.all_gather(dy.contiguous()), partial)

    def weight_grad(self, param: Parameter, x: Tensor, dy: Tensor, partial: Communicator | None = None) -> None:
        """As GradientSink."""
        raise NotImplementedError


class ParamGradSink(_ImmediateSink):
    """Accumulate into `param.grad` at once, in the parameter's dtype; partial sums are all-reduced at once too.

    Cost: one all-reduce a norm weight and micro-batch over `partial`; the engine's own sink defers it to a bucket.
    """

    def weight_grad(self, param: Parameter, x: Tensor, dy: Tensor, partial: Communicator | None = None) -> None:
        self.add(param, dy.T @ x, partial)

    def add(self, param: Parameter, grad: Tensor, partial: Communicator | None = None) -> None:
        if partial is not None and partial.size > 1:
            grad = partial.all_reduce_(grad.contiguous())
        _gradient_of(param).add_(grad)

    def add_rows(self, param: Parameter, rows: Tensor, grad: Tensor) -> None:
        add_rows_(_gradient_of(param), rows, grad.to(param.dtype))


class Buckets(Protocol):
    """What counts contributions to gradients: data_parallel.GradientBuckets."""

    def contributed(self, index: int) -> None:
        """Count one contribution to a gradient in bucket `index`, after it has been added."""


class BufferSink(_ImmediateSink):
    """Accumulate into buffers that lie in buckets, which count contributions.

    Deferred partial sums: `partial` is ignored here; the bucket that holds the parameter is summed over those ranks
    together with data parallelism (parameters.ParameterSpec.reduce_over).
    """

    def __init__(self) -> None:
        self._places: dict[Parameter, tuple[Tensor, int]] = {}
        self._buckets: Buckets

    def __deepcopy__(self, memo: object) -> ParamGradSink:
        """A copied module's gradients go to its own parameters: the buffers and their buckets are the original's."""
        return ParamGradSink()

    def attach(self, places: Mapping[Parameter, tuple[Tensor, int]], buckets: Buckets) -> None:
        """Say where each parameter's gradient goes.

        Args:
            places: parameter -> (tensor of its shape in the accumulation dtype, zeroed by its owner; its bucket).
            buckets: count the contributions.
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
    """Contributions to weight gradients that input halves (I) have left for their weight halves (W).

    Memory: from I to W what each contribution multiplies: a layer's input and the gradient of its output.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._open: list[Callable[[], None]] | None = None

    @property
    def is_open(self) -> bool:
        """Whether an input half is running."""
        return self._open is not None

    def add(self, contribute: Callable[[], None]) -> None:
        """Keep a contribution of the input half that is running."""
        assert self._open is not None, "no input half is running"
        self._open.append(contribute)

    @contextmanager
    def of(self, piece: tuple[int, int]) -> Iterator[None]:
        """Keep what is contributed meanwhile, for `run` of the same (chunk, micro-batch)."""
        assert self._open is None, "one input half runs at a time"
        self._open = self._waiting[piece] = []
        try:
            yield
        finally:
            self._open = None

    @torch.no_grad()
    def run(self, piece: tuple[int, int]) -> None:
        """Add what the input half of (chunk, micro-batch) has left, in its order, and let go of it."""
        waiting = self._waiting.pop(piece)
        waiting.reverse()
        while waiting:
            # Popped before it runs: what it multiplied is free as soon as it has been added.
            waiting.pop()()


class DeferringSink:
    """Hands contributions on to another sink: at once, or, while an input half runs, with its weight half.

    All of them are put off, also those of norms and embeddings, so that each parameter's sum is taken in the order of
    the micro-batches' weight halves, and its bits do not depend on the schedule.

    Args:
        inner: where contributions go.
        halves: what waits; shared by all sinks of a rank.
    """

    def __init__(self, inner: GradientSink, halves: WeightHalves) -> None:
        self.inner, self.halves = inner, halves

    def __deepcopy__(self, memo: object) -> ParamGradSink:
        """As BufferSink: no schedule runs the halves of a copy."""
        return ParamGradSink()

    @property
    def defers(self) -> bool:
        """As GradientSink."""
        return self.halves.is_open

    def weight_grads(
        self,
        pairs: WeightPairs,
        x: Tensor,
        *,
        gather_x: Communicator | None = None,
        gather_dy: Communicator | None = None,
    ) -> None:
        """As GradientSink."""
        # Without _now_or_later, one call less: nearly all weight gradients come this way.
        if self.halves.is_open:
            self.halves.add(
                functools.partial(self.inner.weight_grads, pairs, x, gather_x=gather_x, gather_dy=gather_dy)
            )
        else:
            self.inner.weight_grads(pairs, x, gather_x=gather_x, gather_dy=gather_dy)

    def weight_grad(self, param: Parameter, x: Tensor, dy: Tensor, partial: Communicator | None = None) -> None:
        """As GradientSink."""
        self._now_or_later(self.inner.weight_grad, param, x, dy, partial)

    def add(self, param: Parameter, grad: Tensor, partial: Communicator | None = None) -> None:
        """As GradientSink."""
        self._now_or_later(self.inner.add, param, grad, partial)

    def add_rows(self, param: Parameter, rows: Tensor, grad: Tensor) -> None:
        """As GradientSink."""
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
