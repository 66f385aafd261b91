"""Flat gradient buckets: layout, counting of contributions, reductions in the plan's order.

A bucket is one flat tensor in promote_types(dtype, float32); the gradients of its parameters are views of it, so a
reduction is one collective without any copy. Gradients are zeroed when a step begins and accumulated over its
micro-batches. Reductions start only while armed, that is inside the backward pass the plan names, and in exactly
the plan's order: a bucket that completes early waits its turn, since all replicas must issue the same collectives
in the same order.

What is deliberately elsewhere: which parameters share a bucket (parameters.bucket_layouts, torch-free), and who
adds to the views (gradients.BufferSink).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter


class Layout(Protocol):
    """What a bucket holds: see parameters.BucketLayout."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def numels(self) -> tuple[int, ...]: ...


class Reduction(Protocol):
    """A sum over ranks under way."""

    def wait(self) -> object: ...


class GradientBuckets:
    """The gradient buffers of one rank.

    Args:
        layouts: which parameters lie in each bucket, by bucket index.
        parameters: every parameter by name.
        contributions: how many contributions one backward pass makes to each parameter.
        reduce: starts summing a bucket's flat tensor over its ranks: (bucket index, tensor) -> pending sum.
        dtype, device: of the buffers.

    Attributes:
        flat: the buffers by bucket index.
        gradients: parameter name -> its view, of the parameter's shape.

    Raises:
        RuntimeError: from `disarm`, a reduction the plan asks for could not start since contributions are missing.

    Memory: one element of `dtype` a parameter element.
    """

    def __init__(
        self,
        layouts: Mapping[int, Layout],
        parameters: Mapping[str, Parameter],
        contributions: Mapping[str, int],
        reduce: Callable[[int, Tensor], Reduction],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._reduce = reduce
        self.flat: dict[int, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self._bucket_of: dict[Parameter, int] = {}
        self._expected: dict[int, int] = {}
        for index, layout in layouts.items():
            self.flat[index] = torch.zeros(sum(layout.numels), dtype=dtype, device=device)
            pieces = self.flat[index].split(list(layout.numels))
            for name, piece in zip(layout.names, pieces, strict=True):
                self.gradients[name] = piece.view_as(parameters[name])
                self._bucket_of[parameters[name]] = index
            self._expected[index] = sum(contributions[name] for name in layout.names)
        self._missing: dict[int, int] = {}
        self._order: list[int] = []
        self._pending: dict[int, Reduction] = {}
        self._on_start: Callable[[int], None] | None = None

    def zero(self) -> None:
        """Begin a step: clear all gradients."""
        assert not self._pending, f"reductions of the last step were not waited for: {sorted(self._pending)}"
        for flat in self.flat.values():
            flat.zero_()

    def arm(self, order: Sequence[int], on_start: Callable[[int], None] | None = None) -> None:
        """Expect the last contributions to the buckets `order` in the coming backward pass; reduce in that order.

        Args:
            order: bucket indices.
            on_start: called with the bucket's index at the moment its reduction starts (for the trace).
        """
        assert not self._order, f"buckets {self._order} are still armed"
        self._order = list(order)
        self._missing = {index: self._expected[index] for index in order}
        self._on_start = on_start

    def contributed(self, parameter: Parameter) -> None:
        """Count one contribution; start whatever reduction has become due."""
        index = self._bucket_of[parameter]
        if index not in self._missing:
            return
        self._missing[index] -= 1
        while self._order and self._missing[self._order[0]] == 0:
            due = self._order.pop(0)
            if self._on_start is not None:
                self._on_start(due)
            self._pending[due] = self._reduce(due, self.flat[due])

    def disarm(self) -> None:
        """End the backward pass: every armed bucket must have started its reduction."""
        late = {index: self._missing[index] for index in self._order}
        self._order, self._missing = [], {}
        if late:
            raise RuntimeError(
                f"every bucket must be complete when the last backward ends: contributions missing by bucket "
                f"{late}: a parameter took no part in the backward pass"
            )

    def wait(self, index: int) -> None:
        """Wait until the sum of bucket `index` is there."""
        self._pending.pop(index).wait()
