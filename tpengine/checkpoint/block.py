"""A rank's block of a global tensor, as torch.distributed.checkpoint's planners see it.

`Block` answers what the planners ask a DTensor (write items, chunk list) with the same metadata: global shape, offset,
local shape. It is not a DTensor, because a DTensor cuts a dim as torch.chunk does, and a vocabulary whose padding is
not stored, or a KV head that several ranks hold, is cut otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class Block:
    """One block of a global tensor.

    Attributes:
        tensor: the block's elements; loading writes into it, saving reads it.
        offset: where it lies in the global tensor.
        global_shape: of the global tensor.
        stored: whether saving stores this block. Of ranks that hold the same block one stores it.
    """

    tensor: Tensor
    offset: tuple[int, ...]
    global_shape: tuple[int, ...]
    stored: bool = True

    @classmethod
    def whole(cls, tensor: Tensor, *, stored: bool = True) -> Block:
        """A tensor that every rank holds whole."""
        return cls(tensor, (0,) * tensor.dim(), tuple(tensor.shape), stored)

    def size(self) -> torch.Size:
        """Shape of the global tensor, which the planners compare."""
        return torch.Size(self.global_shape)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        data = TensorWriteData(self._chunk(), TensorProperties.create_from_tensor(self.tensor), self.size())
        return [WriteItem(MetadataIndex(fqn, self.offset), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offset), self.tensor.shape)


@dataclass(frozen=True)
class Blocks:
    """Several blocks of one global tensor, on one rank."""

    parts: tuple[Block, ...]

    def size(self) -> torch.Size:
        """Shape of the global tensor, which the planners compare."""
        return self.parts[0].size()

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [item for part in self.parts for item in part.__create_write_items__(fqn, part)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for part in self.parts for chunk in part.__create_chunk_list__()]


def parts_of(entry: Block | Blocks) -> tuple[Block, ...]:
    """The blocks of an entry, one or several."""
    return entry.parts if isinstance(entry, Blocks) else (entry,)


def _tensor_at(entry: Block | Blocks, index: MetadataIndex) -> Tensor:
    """The tensor of the block that the planners know by its offset."""
    return next(part.tensor for part in parts_of(entry) if tuple(index.offset or ()) == part.offset)


class BlockSavePlanner(DefaultSavePlanner):
    """torch's planner over a flat dict of blocks."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _tensor_at(self.state_dict[index.fqn], index)


class BlockLoadPlanner(DefaultLoadPlanner):
    """torch's planner over a flat dict of blocks."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """As the parent's, which also walks the values to allocate meta tensors and drops those it does not know."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _tensor_at(self.state_dict[index.fqn], index)
