"""The gradients of any module where replicas own slices of their sums (ZeRO 1 to 3).

At zero 1 whole gradients are added up, and reduce-scattered once. From zero 2 on every backward pass reduce-scatters: a
bucket has memory from its first gradient in a pass to the end of its sum, and what is kept is the slice. The first sum
of a step is written there at once, later ones are added to it.

Nothing here waits before the pass ends. A rank that waited for a sum in the middle of backward could wait for a rank
that waits for its next gather.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from tpengine.data_parallel.buckets import GradientBuckets
from tpengine.data_parallel.sliced_buckets import SlicedBuckets, set_memory
from tpengine.layers.collectives import Communicator, Work
from tpengine.layout.parameters import BucketLayout


class UnitGradients(SlicedBuckets):
    """The gradients of all trained buckets, in promote_types(dtype, float32).

    Args:
        layouts: of the trained buckets, by index.
        held: the parameters, by name.
        comm: the replicas.
        each: every backward pass is summed on its own (zero 2 and 3).
    """

    def __init__(
        self, layouts: Mapping[int, BucketLayout], held: Mapping[str, Parameter], comm: Communicator, *, each: bool
    ) -> None:
        self._layouts = layouts
        # Gradients that nothing has been added to: their place holds anything.
        self._empty: dict[int, set[str]] = {index: set(layout.names) for index, layout in layouts.items()}
        # Buckets without a sum in this step, whose slices hold anything: then no backward ran anywhere, and nobody has
        # gradients. And buckets whose sums go straight into their slices.
        self._unsummed = set(layouts) if each else set()
        self._straight: set[int] = set()
        names = [name for layout in layouts.values() for name in layout.names]
        super().__init__(
            layouts,
            {name: _wide(held[name]) for name in names},
            dict.fromkeys(names, 1),
            comm,
            None,
            held[names[0]].device if names else torch.device("cpu"),
            each=each,
        )

    def arm(self, order: Sequence[int], on_start: Callable[[int], None] | None = None) -> None:
        """See GradientBuckets; a buffer gets its memory with its first gradient."""
        GradientBuckets.arm(self, order, on_start)

    def zero(self) -> None:
        """See GradientBuckets; whole gradients and slices are written when the first term comes."""
        if self._each:
            self._unsummed = set(self._layouts)
            return
        for index, layout in self._layouts.items():
            self._empty[index] = set(layout.names)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a term to a gradient."""
        view, index = self.place(name)
        self._open(index)
        if name in self._empty[index]:
            self._empty[index].remove(name)
            view.copy_(gradient)
        else:
            view.add_(gradient)

    def is_started(self, index: int) -> bool:
        """Return whether it is too late in this pass to add to a bucket."""
        return self._each and index not in self._order

    def complete(self, index: int) -> None:
        """Hear that a bucket gets no more gradients in this pass."""
        if index in self._order:
            self._missing[index] = 0
            self._start_due()

    def drain(self) -> None:
        """Start all sums that are left, and wait for all."""
        self.flush()
        for index in list(self._pending):
            self.wait(index)

    def wait(self, index: int) -> Work:
        """See SlicedBuckets."""
        if index not in self._straight:
            return super().wait(index)
        self._straight.remove(index)
        work = GradientBuckets.wait(self, index)
        set_memory(self.flat[index], False)
        return work

    def _start_sum(self, index: int, flat: Tensor) -> Work:
        if index not in self._unsummed:
            return super()._start_sum(index, flat)
        self._unsummed.remove(index)
        self._straight.add(index)
        return self._comm.start_reduce_scatter(flat, self.slices[index])

    def reduce(self, index: int) -> Work:
        """See GradientBuckets; let go of buffers whose sums are there."""
        for earlier in [i for i, work in self._pending.items() if work.is_complete()]:
            self.wait(earlier)
        self._open(index)
        # What nobody wrote is zero: gradients of unused parameters, and the padding.
        for name in self._empty[index]:
            self.gradients[name].zero_()
        self.flat[index][self._layouts[index].numel :].zero_()
        self._empty[index] = set()
        return super().reduce(index)

    def _open(self, index: int) -> None:
        if not self.has_memory(index):
            set_memory(self.flat[index], True)
            self._empty[index] = set(self._layouts[index].names)


def _wide(parameter: Parameter) -> Tensor:
    """Return a tensor without memory of a gradient's shape, strides and dtype."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return torch.empty_like(parameter, device="meta", dtype=dtype, requires_grad=False)
