"""Flat gradient buckets: layout, counting of contributions, reductions in the plan's order.

A bucket is one flat tensor; gradients are views of it, so a reduction is one collective without any copy. Reductions
start only while armed, and in exactly the order given: a bucket that completes early waits its turn, since all replicas
must issue the same collectives in the same order.

What is deliberately elsewhere: which parameters share a bucket and who adds to the views. In the engine these are
parameters.bucket_layouts (torch-free) and gradient_sink.BufferSink: buckets lie in promote_types(dtype, float32), are
zeroed when a step begins, accumulate over its micro-batches and are armed for the backward pass the plan names. For
any `nn.Module` both are data_parallel.module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.pending import Work
from tpkernels.ops.buffers import zero_all_

_Value = TypeVar("_Value", torch.dtype, torch.device)


class Layout(Protocol):
    """What a bucket holds: see parameters.BucketLayout."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def numels(self) -> tuple[int, ...]: ...
    @property
    def packs(self) -> tuple[tuple[str, ...], ...]: ...


class GradientBuckets:
    """The gradient buffers of one rank.

    Args:
        layouts: which parameters lie in each bucket, by bucket index.
        shaped: by name, a tensor of each gradient's shape and strides: its parameter.
        contributions: how many contributions one backward pass makes to each.
        comms: the ranks over which each bucket is summed, by bucket index.
        dtype, device: of the buffers; None takes each bucket's from its members, which must agree.
        in_tree: sum in a balanced tree of ranks, whatever the transport.
        before_sum: called with the bucket's index when all contributions are there, before they are summed.
        count_usage: each buffer ends in one more element per parameter. There a rank says whether it used the
            parameter, and the count is summed along with the gradients.
        padded_to: by bucket index, elements of a buffer that is to be longer than its gradients.

    Attributes:
        flat: the buffers by bucket index, whole.
        sums: the part of each buffer that holds gradients.
        usage: the rest, in the order of the layout's names; empty without `count_usage`.
        gradients: name -> its view, of the parameter's shape and strides.
        packs: the names of gradients that are declared to be rows of one matrix -> that matrix, a view of them all.
        starting_ns: how long the host has been in starting reductions so far, in nanoseconds: next to nothing, unless
            the transport sums before it returns.

    Raises:
        RuntimeError: from `disarm`, a reduction the plan asks for could not start since contributions are missing.

    Memory: one element of the buffer's dtype a gradient element.
    """

    def __init__(
        self,
        layouts: Mapping[int, Layout],
        shaped: Mapping[str, Tensor],
        contributions: Mapping[str, int],
        comms: Mapping[int, Communicator],
        dtype: torch.dtype | None,
        device: torch.device | None,
        *,
        in_tree: bool = False,
        before_sum: Callable[[int], None] | None = None,
        count_usage: bool = False,
        padded_to: Mapping[int, int] | None = None,
    ) -> None:
        self._comms, self._in_tree, self._before_sum = comms, in_tree, before_sum
        self.flat: dict[int, Tensor] = {}
        self.sums: dict[int, Tensor] = {}
        self.usage: dict[int, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.packs: dict[tuple[str, ...], Tensor] = {}
        self._bucket_of: dict[str, int] = {}
        self._expected: dict[int, int] = {}
        for index, layout in layouts.items():
            members = [shaped[name] for name in layout.names]
            num_gradients, num_counts = sum(layout.numels), len(members) if count_usage else 0
            numel = num_gradients + num_counts
            self.flat[index] = torch.zeros(
                numel if padded_to is None else padded_to[index],
                dtype=dtype or _the_one({p.dtype for p in members}),
                device=device or _the_one({p.device for p in members}),
            )
            self.sums[index], self.usage[index] = self.flat[index][:numel].split([num_gradients, num_counts])
            pieces = self.sums[index].split(list(layout.numels))
            for name, member, piece in zip(layout.names, members, pieces, strict=True):
                self.gradients[name] = piece.as_strided(member.shape, dense_strides(member))
                self._bucket_of[name] = index
            for names in layout.packs:
                self.packs[names] = _one_matrix(self.sums[index], {name: self.gradients[name] for name in names})
            self._expected[index] = sum(contributions[name] for name in layout.names)
            self.made(index)
        self._missing: dict[int, int] = {}
        self._order: list[int] = []
        self._pending: dict[int, Work] = {}
        self._on_start: Callable[[int], None] | None = None
        self.starting_ns = 0

    def made(self, index: int) -> None:
        """Do nothing; called after each buffer is made and before the next one is, for subclasses."""

    def zero(self) -> None:
        """Begin a step: clear all gradients."""
        assert not self._pending, f"reductions of the last step were not waited for: {sorted(self._pending)}"
        zero_all_(self.flat.values())

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

    def place(self, name: str) -> tuple[Tensor, int]:
        """Where a gradient lies: its view, and its bucket."""
        return self.gradients[name], self._bucket_of[name]

    def contributed(self, index: int) -> None:
        """Count one contribution to a gradient in bucket `index`; start whatever reduction has become due."""
        if index not in self._missing:
            return
        self._missing[index] -= 1
        self._start_due()

    def _start_due(self) -> None:
        while self._order and self._missing[self._order[0]] == 0:
            self._start(self._order.pop(0))

    def _start(self, due: int) -> None:
        begin = time.perf_counter_ns()
        self._pending[due] = self.reduce(due)
        self.starting_ns += time.perf_counter_ns() - begin

    def flush(self) -> None:
        """End the backward pass, contributions missing or not: start the reductions that are left, in order."""
        while self._order:
            self._start(self._order.pop(0))
        self._missing = {}

    def reduce(self, index: int) -> Work:
        """Start summing a bucket over its ranks; `contributed` and `flush` call this when its turn has come."""
        if self._on_start is not None:
            self._on_start(index)
        if self._before_sum is not None:
            self._before_sum(index)
        return self._start_sum(index, self.flat[index])

    def _start_sum(self, index: int, flat: Tensor) -> Work:
        comm = self._comms[index]
        return comm.start_all_reduce_in_tree(flat) if self._in_tree else comm.start_all_reduce(flat)

    def disarm(self) -> None:
        """End the backward pass: every armed bucket must have started its reduction."""
        late = {index: self._missing[index] for index in self._order}
        self._order, self._missing = [], {}
        if late:
            raise RuntimeError(
                f"every bucket must be complete when the last backward ends: contributions missing by bucket "
                f"{late}: a parameter took no part in the backward pass"
            )

    def has_memory(self, index: int) -> bool:
        """Whether the buffer of bucket `index` can be read."""
        return True

    def wait(self, index: int) -> Work:
        """Wait until the sum of bucket `index` is there; return it, for who asks when it ended."""
        work = self._pending.pop(index)
        work.wait()
        return work

    def is_complete(self, index: int) -> bool:
        """Whether `wait` of bucket `index` would return at once."""
        return self._pending[index].is_complete()


def _one_matrix(flat: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
    """Return the matrix whose rows are some gradients of a flat buffer, as its layout declares them to be."""
    first = next(iter(rows.values()))
    width, place = first.shape[1], first.storage_offset()
    for name, gradient in rows.items():
        is_next = gradient.storage_offset() == place and gradient.shape[1:] == (width,) and gradient.is_contiguous()
        assert is_next, f"gradients that are declared one matrix lie behind each other: {list(rows)}: {name} does not"
        place += gradient.numel()
    return flat.as_strided((sum(map(len, rows.values())), width), (width, 1), first.storage_offset())


def dense_strides(member: Tensor) -> tuple[int, ...]:
    """Return those of a dense tensor laid out like the parameter: optimizers take their fast path where they agree."""
    return torch.empty_like(member, device="meta").stride()


def _the_one(values: set[_Value]) -> _Value:
    assert len(values) == 1, f"a bucket holds one dtype and one device: got {values}"
    return next(iter(values))
