"""Where weight gradients go: into autograd or into the engine's buffers, now or later.

The backward of a layer's Function hands its weights, x and dy to a sink, which decides when and where their gradients
are computed. What the sink returns, the Function returns to autograd.

`GradientSink` adds now. The default of every layer, attached to nothing, returns the gradient: so weights may be
computed (parametrizations, functional_call) and hooked, `torch.autograd.grad` finds them, and the layers work in any
model under any optimizer. The engine attaches it to its flat buffers: then it accumulates into these and returns
nothing. Where dtypes agree, the GEMM accumulates without an intermediate tensor, and weights whose gradients the engine
keeps behind each other get them from one GEMM. `DeferringSink` adds later: it passes contributions to another sink,
and lets a schedule run the weight half of a backward pass later than its input half. The price of both uses by the
engine: the gradient is a side effect of backward. It reaches parameters only, and hooks are not called as torch calls
them; `check_reaches` refuses such weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from tpkernels.exchange.communicator import Communicator
from tpkernels.launch import accumulation_dtype as accumulation_dtype
from tpkernels.ops.embedding import add_rows_
from tpkernels.ops.experts.grouped import accumulate_grouped_wgrad
from tpkernels.ops.matmul.wgrad import accumulate_wgrad


class WeightTerm(NamedTuple):
    """A weight[out, in] whose output is y = x @ weight.T, or some columns of it.

    Attributes:
        weight: it.
        first: where its columns begin in y and dy.
        partial: as GradientSink.
    """

    weight: Tensor
    first: int
    partial: Communicator | None

    def columns_of(self, dy: Tensor) -> Tensor:
        """Return dy_i[T, out] of dy[T, ...]."""
        return _columns(dy, self.first, len(self.weight))


def _columns(dy: Tensor, first: int, num: int) -> Tensor:
    return dy if num == dy.shape[1] else dy[:, first : first + num]


WeightTerms = Sequence[WeightTerm]
Gradients = Sequence[Tensor | None]


class Buckets(Protocol):
    """Counts contributions to gradients: data_parallel.GradientBuckets."""

    def contributed(self, index: int) -> None:
        """Count one contribution to a gradient in bucket `index`, after it has been added."""


class GradientSink:
    """Adds each contribution to a weight's gradient as soon as it is given.

    Each method returns the gradient if autograd is to accumulate it, which casts as with any other, or None if the sink
    has taken it: then it lies in the buffer that `attach` has named, whose bucket counts contributions.

    `partial` names the ranks that hold the same parameter, each with only a part of its gradient's sum (norm weights:
    tp; replicated KV weights: the replicas). What autograd is given is summed over them at once. A buffer's bucket is
    summed over data-parallel ranks and those ranks together, later (parameters.ParameterSpec.reduce_over).

    Weights whose gradients are declared to lie behind each other, and whose dy do too, get theirs from one product. Who
    lays the gradients out declares it (data_parallel/bucket.py); addresses are not compared.

    Cost: for autograd, one all-reduce over `partial` per norm weight and micro-batch; none for a buffer.
    """

    def __init__(self) -> None:
        self._buckets: Buckets | None = None
        self._places: Mapping[Any, tuple[Tensor, int]] = {}
        # By the first weight of each.
        self._packs: Mapping[Any, tuple[tuple[Parameter, ...], Tensor]] = {}

    def __deepcopy__(self, memo: object) -> GradientSink:
        """Return a sink that is attached to nothing: buffers belong to the original module, not to its copy."""
        return GradientSink()

    @property
    def is_autograds(self) -> bool:
        """Whether autograd gets every gradient at once, as of any other module."""
        return self._buckets is None

    @property
    def defers(self) -> bool:
        """Whether this backward pass is an input half: what a layer gives now is added later.

        A layer that would gather a tensor only for its weight gradients then leaves that gather to `weight_grads`.
        """
        return False

    def attach(
        self,
        places: Mapping[Parameter, tuple[Tensor, int]],
        buckets: Buckets,
        packs: Mapping[tuple[Parameter, ...], Tensor] = MappingProxyType({}),
    ) -> None:
        """Say where each parameter's gradient goes.

        Args:
            places: parameter -> (tensor of its shape in the accumulation dtype, zeroed by its owner; its bucket).
            buckets: told of each contribution.
            packs: parameters whose gradients lie behind each other -> all of these as one matrix.
        """
        self._places, self._buckets = dict(places), buckets
        self._packs = {weights[0]: (weights, matrix) for weights, matrix in packs.items()}

    def weight_grads(
        self,
        terms: WeightTerms,
        dy: Tensor,
        x: Tensor,
        *,
        gather_x: Communicator | None = None,
        gather_dy: Communicator | None = None,
    ) -> Gradients:
        """Add dw_i[out_i, in] = dy_i[T, out_i].T @ x[T, in] to each parameter's gradient, after one gather for all.

        Args:
            terms: the weights that x is multiplied by, in the order of their columns.
            dy: [T, ...], all dy_i side by side, or this rank's rows of it if `gather_dy` is given.
            x: [T, in], or this rank's rows of it if `gather_x` is given.
            gather_x, gather_dy: the ranks over which to gather x, or dy, before the product; None: it is whole.
        """
        x = x if gather_x is None else gather_x.all_gather(x)
        dy = dy if gather_dy is None else gather_dy.all_gather(dy.contiguous())
        if not self._packs:
            return [self.weight_grad(term.weight, x, term.columns_of(dy), term.partial) for term in terms]
        gradients: list[Tensor | None] = []
        while len(gradients) < len(terms):
            term = terms[len(gradients)]
            weights, matrix = self._packs.get(term.weight, ((), None))
            these = terms[len(gradients) : len(gradients) + len(weights)]
            if matrix is not None and _are_side_by_side(these, weights):
                accumulate_wgrad(matrix, _columns(dy, term.first, len(matrix)), x)
                for weight in weights:
                    self._counted(self._places[weight][1])
                gradients += [None] * len(weights)
            else:
                gradients.append(self.weight_grad(term.weight, x, term.columns_of(dy), term.partial))
        return gradients

    def weight_grad(self, param: Tensor, x: Tensor, dy: Tensor, partial: Communicator | None = None) -> Tensor | None:
        """Add dw[out, in] = dy[T, out].T @ x[T, in] to the gradient of `param`."""
        if self._buckets is None:
            return self.add(param, dy.T @ x, partial)
        buffer, bucket = self._places[param]
        accumulate_wgrad(buffer, dy, x)
        self._counted(bucket)
        return None

    def add(self, param: Tensor, grad: Tensor, partial: Communicator | None = None) -> Tensor | None:
        """Add a gradient that is already computed, of `param`'s shape, in the accumulation dtype."""
        if self._buckets is None:
            if partial is None or partial.size == 1:
                return grad
            # Summed over ranks in the wider dtype: under autocast a float32 parameter's product is in 16 bits.
            return partial.all_reduce_(grad.to(torch.promote_types(grad.dtype, param.dtype)).contiguous())
        buffer, bucket = self._places[param]
        buffer.add_(grad)
        self._counted(bucket)
        return None

    def add_rows(self, param: Tensor, rows: Tensor, grad: Tensor) -> Tensor | None:
        """Add grad[n, :] to row rows[n] of the gradient of `param`, for every n.

        Rows may repeat; those outside `param` are skipped.
        """
        if self._buckets is None:
            total = torch.zeros(param.shape, dtype=param.dtype, device=param.device)
            add_rows_(total, rows, grad.to(param.dtype))
            return total
        buffer, bucket = self._places[param]
        add_rows_(buffer, rows, grad)
        self._counted(bucket)
        return None

    def grouped_weight_grad(
        self, param: Tensor, dy: Tensor, x: Tensor, offsets: Tensor, *, fixed: bool = False, usual_rows: int = 0
    ) -> Tensor | None:
        """Add dw[e, out, in] = dy_e[., out].T @ x_e[., in] of each expert's rows to the gradient of `param`.

        Args:
            param: w[E, out, in].
            dy, x: [R, out] and [R, in], sorted by expert.
            offsets: [E + 1]; rows offsets[e] to offsets[e + 1] are of expert e. An expert without rows adds nothing.
            fixed: as grouped_matmul: in exact mode.
            usual_rows: as grouped_matmul_forward.
        """
        if self._buckets is None:
            total = torch.zeros(param.shape, dtype=accumulation_dtype(dy.dtype), device=dy.device)
            accumulate_grouped_wgrad(total, dy, x, offsets, fixed=fixed, usual_rows=usual_rows)
            return total
        buffer, bucket = self._places[param]
        accumulate_grouped_wgrad(buffer, dy, x, offsets, fixed=fixed, usual_rows=usual_rows)
        self._counted(bucket)
        return None

    def _counted(self, bucket: int) -> None:
        """Count a contribution that has been added to a buffer."""
        assert self._buckets is not None, "only buckets count"
        self._buckets.contributed(bucket)


def _are_side_by_side(terms: WeightTerms, weights: Sequence[Tensor]) -> bool:
    """Return whether the terms are those of the weights, and each one's columns begin where the last one's end."""
    if len(terms) != len(weights):
        return False
    end = terms[0].first
    for term, weight in zip(terms, weights, strict=True):
        if term.weight is not weight or term.first != end:
            return False
        end += len(weight)
    return True


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


class DeferringSink(GradientSink):
    """Passes contributions to another sink: at once, or, while an input half runs, in its weight half.

    Those of norms and embeddings are deferred too. So each parameter's sum is taken in the order of the micro-batches'
    weight halves, and its bits do not depend on the schedule.

    Args:
        inner: receives the contributions.
        halves: keeps the deferred ones; shared by all sinks of a rank.
    """

    def __init__(self, inner: GradientSink, halves: WeightHalves) -> None:
        super().__init__()
        self.inner, self.halves = inner, halves

    @property
    def is_autograds(self) -> bool:
        """See GradientSink: never, since autograd gets nothing of an input half."""
        return False

    @property
    def defers(self) -> bool:
        """See GradientSink."""
        return self.halves.is_open

    def weight_grads(
        self,
        terms: WeightTerms,
        dy: Tensor,
        x: Tensor,
        *,
        gather_x: Communicator | None = None,
        gather_dy: Communicator | None = None,
    ) -> Gradients:
        """See GradientSink."""
        # Not through _now_or_later, to save a call: nearly all weight gradients come this way.
        if self.halves.is_open:
            self.halves.add(functools.partial(self._add_terms, terms, dy, x, gather_x, gather_dy))
            return [None] * len(terms)
        return self.inner.weight_grads(terms, dy, x, gather_x=gather_x, gather_dy=gather_dy)

    def weight_grad(self, param: Tensor, x: Tensor, dy: Tensor, partial: Communicator | None = None) -> Tensor | None:
        """See GradientSink."""
        return self._now_or_later(self.inner.weight_grad, param, x, dy, partial)

    def add(self, param: Tensor, grad: Tensor, partial: Communicator | None = None) -> Tensor | None:
        """See GradientSink."""
        return self._now_or_later(self.inner.add, param, grad, partial)

    def add_rows(self, param: Tensor, rows: Tensor, grad: Tensor) -> Tensor | None:
        """See GradientSink."""
        return self._now_or_later(self.inner.add_rows, param, rows, grad)

    def grouped_weight_grad(
        self, param: Tensor, dy: Tensor, x: Tensor, offsets: Tensor, *, fixed: bool = False, usual_rows: int = 0
    ) -> Tensor | None:
        """See GradientSink."""
        grad = functools.partial(self.inner.grouped_weight_grad, fixed=fixed, usual_rows=usual_rows)
        return self._now_or_later(grad, param, dy, x, offsets)

    def _now_or_later(self, contribute: Callable[..., Tensor | None], param: Tensor, *args: Any) -> Tensor | None:
        if not self.halves.is_open:
            return contribute(param, *args)
        self.halves.add(lambda: _accumulate(param, contribute(param, *args)))
        return None

    def _add_terms(
        self, terms: WeightTerms, dy: Tensor, x: Tensor, gather_x: Communicator | None, gather_dy: Communicator | None
    ) -> None:
        gradients = self.inner.weight_grads(terms, dy, x, gather_x=gather_x, gather_dy=gather_dy)
        for term, gradient in zip(terms, gradients, strict=True):
            _accumulate(term.weight, gradient)


def _accumulate(param: Tensor, gradient: Tensor | None) -> None:
    """Do what autograd does with a gradient that a backward returns: hooks, then `.grad`."""
    if gradient is not None:
        torch.autograd.backward([param], [gradient.to(param.dtype)])


def total_of(gradients: Iterable[Tensor | None]) -> Tensor | None:
    """Add what several sinks return for blocks of one gradient, in order; None if they have taken all of it."""
    found = [gradient for gradient in gradients if gradient is not None]
    return functools.reduce(torch.add, found) if found else None


def check_reaches(sink: GradientSink, weight: Tensor, name: str) -> None:
    """Refuse a weight that the sink's gradient would not reach: it would be trained by nobody, without a word.

    Args:
        sink: where the gradient goes.
        weight: as a layer is about to use it.
        name: of the weight, for the message.

    Raises:
        ValueError: the sink is not autograd's, and the weight is computed, replaced by functional_call, or has hooks
            that would be given no gradient. Where a schedule splits backward, hooks that follow an accumulation are
            called at the end of both halves: DataParallel's need no more.

    Cost: for a parameter without hooks, three questions.
    """
    is_hooked = bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)
    is_parameter = isinstance(weight, Parameter) and weight.is_leaf
    if (is_parameter and not is_hooked) or sink.is_autograds:
        return
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return
    if isinstance(sink, DeferringSink) and sink.inner.is_autograds:
        if is_parameter and not weight._backward_hooks:
            return
        where, remedy = "a schedule that splits backward", "use schedule 1f1b or interleaved"
    else:
        where, remedy = "a flat gradient buffer", "train the layer with its default sink"
    what = "has hooks on its gradient" if is_parameter else "is computed (a parametrization, functional_call)"
    raise ValueError(
        f"{where} adds to a layer's own parameters, past autograd: {name} {list(weight.shape)} {what}: {remedy}, or "
        f"{'remove the hooks' if is_parameter else 'make it a parameter: parametrize.remove_parametrizations'}"
    )
