"""Sums over blocks of micro-batches in a balanced tree, in few buffers: a binary counter.

Inside a block micro-batches are accumulated one after the other, in a bucket's own buffer. When a block ends, its sum
is added to those of complete subtrees of the same size, as a carry runs through a binary number; what is left is kept,
and the buffer starts at zero again. The last block's carry runs through all of them and leaves the total in the buffer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class BlockSums:
    """The sums of complete subtrees, for each bucket.

    Args:
        flat: the buffers that micro-batches accumulate into, by bucket index.
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

    def end_block(self, index: int) -> None:
        """Add what bucket `index` holds; after the last block it holds the total, else zeros."""
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
