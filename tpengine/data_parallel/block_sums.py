"""Sums over blocks of micro-batches in a balanced tree, in few buffers: a binary counter.

Inside a block micro-batches are accumulated one after the other, in a bucket's own buffer. When a block ends, its sum
is added to those of complete subtrees of the same size, as a carry runs through a binary number; what is left is kept,
and the buffer starts at zero again. The last block's carry runs through all of them and leaves the total in the buffer.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class BlockSums:
    """The sums of complete subtrees, for each bucket.

    Args:
        flat: the buffers that micro-batches accumulate into, by bucket index.
        num_blocks: blocks of a step on this rank, a power of two.

    Memory: log2(num_blocks) buffers besides each bucket's own.
    """

    def __init__(self, flat: Mapping[int, Tensor], num_blocks: int) -> None:
        assert num_blocks & (num_blocks - 1) == 0, f"{num_blocks} blocks are no power of two"
        self._flat, self._num_blocks = flat, num_blocks
        num_levels = num_blocks.bit_length() - 1
        self._subtrees = {
            index: [buffer.new_empty(buffer.shape) for _ in range(num_levels)] for index, buffer in flat.items()
        }
        self._ended = dict.fromkeys(flat, 0)

    def begin(self) -> None:
        """Begin a step; the buffers are zero."""
        self._ended = dict.fromkeys(self._flat, 0)

    def end_block(self, index: int) -> None:
        """Add what bucket `index` holds; after the last block it holds the total, else zeros."""
        number, buffer = self._ended[index], self._flat[index]
        assert number < self._num_blocks, f"bucket {index} has had all its {self._num_blocks} blocks"
        level = 0
        while number >> level & 1:
            buffer.add_(self._subtrees[index][level])
            level += 1
        self._ended[index] += 1
        if self._ended[index] < self._num_blocks:
            self._subtrees[index][level].copy_(buffer)
            buffer.zero_()
