"""The driver of gradient buckets: counts contributions, starts reductions in the plan's order, waits for them.

Gradients are views of buckets, so a reduction is one collective without any copy. Reductions start only while armed,
and in exactly the order given: a bucket that completes early waits its turn, since all replicas must issue the same
collectives in the same order.

What is deliberately elsewhere: a bucket itself, its cut and its collectives (bucket), which parameters share one and
who adds to the views. In the engine these are parameters.bucket_layouts (torch-free) and gradient_sink: buckets lie in
promote_types(dtype, float32), are zeroed when a step begins, accumulate over its micro-batches and are armed for the
backward pass the plan names. For any `nn.Module` both are modules.data_parallel.

In exact mode blocks of micro-batches are summed in a balanced tree, in few buffers: a binary counter.
Inside a block micro-batches are accumulated one after the other, in a bucket's own buffer. When a block ends, its sum
is added to those of complete subtrees of the same size, as a carry runs through a binary number; what is left is kept,
and the buffer starts at zero again. The last block's carry runs through all of them and leaves the total in the buffer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from tpkernels.exchange.pending import Work
from tpkernels.ops.buffers import zero_all_

from tpengine.data_parallel.bucket import FlatBucket


class BlockSums:
    """The sums of complete subtrees, for each bucket.

    Args:
        flat: the buffers that micro-batches accumulate into, by bucket index: those of several lanes as one tensor.
        num_blocks: blocks of a step on this rank, a power of two.

    Attributes:
        num_blocks: as given.

    Memory: log2(num_blocks) buffers besides each bucket's own.
    """

    def __init__(self, flat: Mapping[int, Tensor], num_blocks: int) -> None:
        assert num_blocks & (num_blocks - 1) == 0, f"{num_blocks} blocks are no power of two"
        self._flat, self.num_blocks = flat, num_blocks
        num_levels = num_blocks.bit_length() - 1
        self._subtrees = {
            index: [buffer.new_empty(buffer.shape) for _ in range(num_levels)] for index, buffer in flat.items()
        }
        self._ended = dict.fromkeys(flat, 0)

    def begin(self) -> None:
        """Begin a step; the buffers are zero."""
        self._ended = dict.fromkeys(self._flat, 0)

    def end_block(self, index: int) -> bool:
        """Add what bucket `index` holds; return whether it was the last block: then it holds the total, else zeros."""
        number, buffer = self._ended[index], self._flat[index]
        assert number < self.num_blocks, f"bucket {index} has had all its {self.num_blocks} blocks"
        self._ended[index] = number + 1
        is_last = number + 1 == self.num_blocks
        # A carry adds the complete subtrees of 1, 2, 4, ... blocks: as many as the number has ones before its lowest 0.
        level = (~number & (number + 1)).bit_length() - 1
        carried = self._subtrees[index][:level]
        kept = buffer if is_last else self._subtrees[index][level]
        for subtree in carried[:-1]:
            buffer.add_(subtree)
        # The last addition writes the sum where it is kept.
        if carried:
            torch.add(buffer, carried[-1], out=kept)
        elif not is_last:
            kept.copy_(buffer)
        if not is_last:
            buffer.zero_()
        return is_last


class GradientBuckets:
    """The gradient buffers of one rank.

    Args:
        buckets: by index.
        contributions: by name, how many contributions one backward pass makes to a gradient, where it is not one.
        in_tree: sum in a balanced tree of ranks, whatever the transport.
        num_blocks: blocks of micro-batches of a step on this rank, which are summed in a balanced tree too; None adds
            all micro-batches one after the other.

    Attributes:
        flat: the buffers by bucket index, whole.
        gradients: name -> its view, of the parameter's shape and strides.
        packs: the names of gradients that are declared to be rows of one matrix -> that matrix, a view of them all.
        blocks: the sums of blocks; None without.
        starting_ns: how long the host has been in starting reductions so far, in nanoseconds: next to nothing, unless
            the transport sums before it returns.

    Raises:
        RuntimeError: from `disarm`, a reduction the plan asks for could not start since contributions are missing.
    """

    def __init__(
        self,
        buckets: Mapping[int, FlatBucket],
        contributions: Mapping[str, int] = MappingProxyType({}),
        *,
        in_tree: bool = False,
        num_blocks: int | None = None,
    ) -> None:
        self._buckets, self._in_tree = buckets, in_tree
        self.flat: dict[int, Tensor] = {index: bucket.flat for index, bucket in buckets.items()}
        self.gradients: dict[str, Tensor] = {}
        self.packs: dict[tuple[str, ...], Tensor] = {}
        self._bucket_of: dict[str, int] = {}
        self._expected: dict[int, int] = {}
        for index, bucket in buckets.items():
            self.gradients |= bucket.views
            self._bucket_of |= dict.fromkeys(bucket.views, index)
            # Each lane has its own.
            self._expected[index] = bucket.num_lanes * sum(contributions.get(name, 1) for name in bucket.views)
            self.packs |= bucket.packs
        self.blocks = None if num_blocks is None else BlockSums(self._lanes, num_blocks)
        self._missing: dict[int, int] = {}
        self._order: list[int] = []
        self._pending: dict[int, Work] = {}
        self._on_start: Callable[[int], None] | None = None
        self.starting_ns = 0

    def __getitem__(self, index: int) -> FlatBucket:
        """Return a bucket."""
        return self._buckets[index]

    def place(self, name: str, lane: int = 0) -> tuple[Tensor, int]:
        """Where a gradient lies: its view in a lane, and its bucket."""
        index = self._bucket_of[name]
        return self._buckets[index].view_of(name, lane) if lane else self.gradients[name], index

    def has_memory(self, index: int) -> bool:
        """Whether the buffer of bucket `index` can be read."""
        return self._buckets[index].has_memory

    def zero(self) -> None:
        """Begin a step: clear all gradients."""
        assert not self._pending, f"reductions of the last step were not waited for: {sorted(self._pending)}"
        zero_all_([bucket.own if bucket.is_transient else bucket.lanes for bucket in self._buckets.values()])
        if self.blocks is not None:
            self.blocks.begin()

    def set_blocks(self, num_blocks: int) -> None:
        """Sum another number of blocks from now on: between steps."""
        if self.blocks is not None and num_blocks != self.blocks.num_blocks:
            self.blocks = BlockSums(self._lanes, num_blocks)

    def arm(self, order: Sequence[int], on_start: Callable[[int], None] | None = None) -> None:
        """Expect the last contributions to the buckets `order` in the coming backward pass; reduce in that order.

        Buckets that have no memory get some, and are zero.

        Args:
            order: bucket indices.
            on_start: called with the bucket's index when all contributions are there and its turn has come, before it
                is summed.
        """
        assert not self._order, f"buckets {self._order} are still armed"
        for bucket in map(self._buckets.__getitem__, order):
            if bucket.is_transient:
                bucket.allocate()
                bucket.flat.zero_()
        self._order = list(order)
        self._missing = {index: self._expected[index] for index in order}
        self._on_start = on_start

    def contributed(self, index: int) -> None:
        """Count one contribution to a gradient in bucket `index`; start whatever reduction has become due."""
        if index not in self._missing:
            return
        self._missing[index] -= 1
        while self._order and self._missing[self._order[0]] == 0:
            self._start(self._order.pop(0))

    def _start(self, due: int) -> None:
        begin = time.perf_counter_ns()
        self._pending[due] = self.reduce(due)
        self.starting_ns += time.perf_counter_ns() - begin

    def reduce(self, index: int) -> Work:
        """Start summing a bucket over its ranks; `contributed` and `flush` call this when its turn has come."""
        if self._on_start is not None:
            self._on_start(index)
        self.end_block(index)
        return self._buckets[index].start_sum(in_tree=self._in_tree)

    def end_block(self, index: int) -> None:
        """End a block of micro-batches of bucket `index`, if blocks are summed; after the last it holds the total.

        Each lane has had as many. After the last block they are joined: as data-parallel ranks with one lane each would
        be, before ranks are.
        """
        if self.blocks is not None and self.blocks.end_block(index):
            self._buckets[index].join_lanes()

    @property
    def _lanes(self) -> dict[int, Tensor]:
        return {index: bucket.lanes for index, bucket in self._buckets.items()}

    def flush(self) -> None:
        """End the backward pass, contributions missing or not: start the reductions that are left, in order."""
        while self._order:
            self._start(self._order.pop(0))
        self._missing = {}

    def disarm(self) -> None:
        """End the backward pass: every armed bucket must have started its reduction."""
        late = {index: self._missing[index] for index in self._order}
        self._order, self._missing = [], {}
        if late:
            raise RuntimeError(
                f"every bucket must be complete when the last backward ends: contributions missing by bucket "
                f"{late}: a parameter took no part in the backward pass"
            )

    def wait(self, index: int) -> Work:
        """Wait until the sum of bucket `index` is there; return it, for who asks when it ended."""
        work = self._pending.pop(index)
        work.wait()
        self._buckets[index].end_sum()
        return work

    def is_complete(self, index: int) -> bool:
        """Whether `wait` of bucket `index` would return at once."""
        return self._pending[index].is_complete()
