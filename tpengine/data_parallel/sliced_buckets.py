"""Gradient buckets whose sums are cut over the replicas: each keeps its own slice (ZeRO 1 to 3).

    slice of replica i [s] = part i of (sum over replicas of flat[d * s])

Once a step, as the whole gradient of all its micro-batches (`each` False), the slice is a part of the whole buffer. Or
for each micro-batch on its own: then a buffer has memory only from the backward that fills it to the end of its sum,
and the slice, which the sums of all micro-batches are added to, is all that is held in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from tpkernels.exchange.communicator import Communicator
from tpkernels.exchange.pending import Work
from tpkernels.ops.buffers import zero_all_

from tpengine.data_parallel.buckets import GradientBuckets
from tpengine.layout.parameters import BucketLayout
from tpengine.layout.slices import slice_numel


class SlicedBuckets(GradientBuckets):
    """The gradient buffers of one rank, and its slices of their sums.

    Args:
        layouts, shaped, contributions, dtype, device: as GradientBuckets.
        comm: the replicas.
        each: sum every micro-batch's contribution on its own.

    Attributes:
        slices: by bucket index, what this replica keeps: after all reductions its part of the sums.
        flat, gradients: as GradientBuckets; with `each` they have memory from `arm` to `wait` only.

    Memory: one element of `dtype` per gradient element; with `each` 1/d of that, and the whole buffers of one backward.
    """

    def __init__(
        self,
        layouts: Mapping[int, BucketLayout],
        shaped: Mapping[str, Tensor],
        contributions: Mapping[str, int],
        comm: Communicator,
        dtype: torch.dtype | None,
        device: torch.device,
        *,
        each: bool,
    ) -> None:
        self._comm, self._each = comm, each
        # This replica's part of each whole buffer, where its sum arrives.
        self._own: dict[int, Tensor] = {}
        sizes = {index: slice_numel(layout, comm.size) for index, layout in layouts.items()}
        super().__init__(
            layouts,
            shaped,
            contributions,
            dict.fromkeys(layouts, comm),
            dtype,
            device,
            padded_to={index: comm.size * size for index, size in sizes.items()},
        )
        self.slices = {index: own.new_zeros(sizes[index]) for index, own in self._own.items()} if each else self._own

    def made(self, index: int) -> None:
        """Take the buffer's memory away again, if buckets have memory only while they are used."""
        self._own[index] = self.flat[index].chunk(self._comm.size)[self._comm.rank]
        if self._each:
            set_memory(self.flat[index], False)

    def zero(self) -> None:
        """See GradientBuckets."""
        if not self._each:
            super().zero()
            return
        zero_all_(self.slices.values())

    def arm(self, order: Sequence[int], on_start: Callable[[int], None] | None = None) -> None:
        """See GradientBuckets; buffers that have no memory get some, and are zero."""
        if self._each:
            for index in order:
                set_memory(self.flat[index], True)
                self.flat[index].zero_()
        super().arm(order, on_start)

    def has_memory(self, index: int) -> bool:
        """See GradientBuckets."""
        return not self._each or has_memory(self.flat[index])

    def wait(self, index: int) -> Work:
        """See GradientBuckets; the sum is in the slice."""
        work = super().wait(index)
        if self._each:
            self.slices[index].add_(self._own[index])
            set_memory(self.flat[index], False)
        return work

    def _start_sum(self, index: int, flat: Tensor) -> Work:
        return self._comm.start_reduce_scatter(flat, self._own[index])


def set_memory(flat: Tensor, wanted: bool) -> None:
    """Give a flat tensor its memory, with any content, or take it away; views of it follow."""
    storage = flat.untyped_storage()
    num_bytes = flat.numel() * flat.element_size() if wanted else 0
    if storage.nbytes() != num_bytes:
        storage.resize_(num_bytes)


def has_memory(flat: Tensor) -> bool:
    """Whether a flat tensor has its memory."""
    return flat.untyped_storage().nbytes() > 0
