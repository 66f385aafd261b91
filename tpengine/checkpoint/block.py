"""A rank's block of a global tensor: what it saves, and what it loads into.

DTensor is not used: it cuts a dim as torch.chunk does. A vocabulary whose padding is not stored, and a KV head that
several ranks hold, are cut in other ways.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Block:
    """One block of a global tensor.

    Attributes:
        tensor: the block's elements; loading writes into it, saving reads it.
        offset: of the block in the global tensor.
        global_shape: of the global tensor.
        stored: whether saving stores this block. Of the ranks that hold the same block, one stores it.
    """

    tensor: Tensor
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    stored: bool = True

    @classmethod
    def whole(cls, tensor: Tensor, *, stored: bool = True) -> Block:
        """Return the block of a tensor that every rank holds whole."""
        return cls(tensor, (0,) * tensor.dim(), tuple(tensor.shape), stored)


@dataclass(frozen=True)
class Blocks:
    """Several blocks of one global tensor, on one rank."""

    parts: tuple[Block, ...]


def parts_of(entry: Block | Blocks) -> tuple[Block, ...]:
    """Return the blocks of an entry, one or several."""
    return entry.parts if isinstance(entry, Blocks) else (entry,)
