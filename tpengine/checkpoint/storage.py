"""Storage for torch.distributed.checkpoint's planners: a safetensors file a rank and a JSON index; nothing is pickled.

The planners decide who writes and reads which block; here is only how blocks become files. A rank writes its blocks
into one file and hashes what the file holds; the coordinator writes the index, last, and gives the checkpoint its name.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from tpengine.checkpoint.directory import CheckpointDirectory
from tpengine.checkpoint.index import (
    DamagedCheckpoint,
    FileEntry,
    Index,
    Piece,
    TensorEntry,
    hash_file,
    unreadable,
    write_index,
)

_DTYPE_OF: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
_NAME_OF = {dtype: name for name, dtype in _DTYPE_OF.items()}


@dataclass(frozen=True)
class _Stored:
    """Where a block went; travels from the rank that wrote it to the coordinator."""

    piece: Piece
    file: FileEntry


class Writer(StorageWriter):
    """Writes one checkpoint.

    Args:
        directory: the run's checkpoints.
        step: optimizer steps done.
        state: what is no tensor, as JSON; the coordinator's is written.
        keep: how many checkpoints to keep, this one included.
    """

    def __init__(self, directory: CheckpointDirectory, step: int, state: Mapping[str, Any], keep: int) -> None:
        self._directory, self._step, self._state, self._keep = directory, step, state, keep

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank its file's name; only ranks with something to write make a file."""
        return [
            replace(plan, storage_data=f"rank-{rank:05}-of-{len(plans):05}.safetensors")
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._write(plan, planner) if plan.items else [])
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        name: str = plan.storage_data
        path = self._directory.begin(self._step) / name
        blocks = {_key(item.index): _tensor(planner, item) for item in plan.items}
        save_file(blocks, str(path))
        # safetensors writes for the owner's eyes only; whoever may enter the directory may read what is in it.
        path.chmod(path.parent.stat().st_mode & 0o666)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        entry = hash_file(path)
        results = []
        for item in plan.items:
            tensor = blocks[_key(item.index)]
            piece = Piece(tuple(item.index.offset or ()), tuple(tensor.shape), name, _key(item.index))
            results.append(WriteResult(item.index, tensor.numel() * tensor.element_size(), _Stored(piece, entry)))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after every rank has written: the index, the name, and the end of what is too old."""
        pieces: dict[str, list[Piece]] = defaultdict(list)
        files: dict[str, FileEntry] = {}
        for result in (result for of_rank in results for result in of_rank):
            stored: _Stored = result.storage_data
            pieces[result.index.fqn].append(stored.piece)
            files[stored.piece.file] = stored.file
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), f"{name} is no tensor"
            dtype = _NAME_OF[tensor.properties.dtype]
            tensors[name] = TensorEntry(dtype, tuple(tensor.size), tuple(pieces[name]))
        beside = self._directory.begin(self._step)
        for name, entry in files.items():  # another node may have written to a disk of its own
            if (beside / name).stat().st_size != entry.num_bytes:
                raise OSError(f"{name} is not what its rank has written")
        write_index(beside, Index(self._step, tensors, files, self._state))
        self._directory.complete(self._step)
        self._directory.prune(self._keep)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


class Reader(StorageReader):
    """Reads one checkpoint, whose files have been checked (load.py).

    Args:
        directory: of the checkpoint.
        index: read from there.
    """

    def __init__(self, directory: Path, index: Index) -> None:
        self._directory, self._index = directory, index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=_DTYPE_OF[entry.dtype]),
                torch.Size(entry.shape),
                [ChunkStorageMetadata(torch.Size(p.offset), torch.Size(p.shape)) for p in entry.pieces],
            )
            for name, entry in self._index.tensors.items()
        }
        return Metadata(tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[ReadItem, Piece]]] = defaultdict(list)
        for item in plan.items:
            piece = self._piece(item.storage_index)
            by_file[piece.file].append((item, piece))
        for name, items in by_file.items():
            self._read_file(self._directory / name, items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _piece(self, index: MetadataIndex) -> Piece:
        offset = tuple(index.offset or ())
        return next(piece for piece in self._index.tensors[index.fqn].pieces if piece.offset == offset)

    def _read_file(self, path: Path, items: list[tuple[ReadItem, Piece]], planner: LoadPlanner) -> None:
        try:
            with safe_open(str(path), framework="pt") as file:
                for item, piece in items:
                    source = file.get_slice(piece.key)
                    expected = (self._index.tensors[item.storage_index.fqn].dtype, list(piece.shape))
                    if (source.get_dtype(), source.get_shape()) != expected:
                        raise SafetensorError(f"{piece.key} is not {expected[0]}{expected[1]}")
                    starts, lengths = item.storage_offsets, item.lengths
                    where = tuple(slice(start, start + n) for start, n in zip(starts, lengths, strict=True))
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(source[where] if where else file.get_tensor(piece.key))
                    planner.commit_tensor(item, target)
        except SafetensorError as error:
            raise DamagedCheckpoint(f"a checkpoint's files must hold what its index says: {path}: {error}") from None
        except OSError as error:
            raise unreadable("a checkpoint's files must be readable", path, error) from None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    data = planner.resolve_data(item)
    assert isinstance(data, torch.Tensor), f"{item.index.fqn} is no tensor"
    return data


def _key(index: MetadataIndex) -> str:
    """Name of a block inside a file: the tensor's, and its offset, since a rank may hold several blocks of one."""
    return f"{index.fqn}@{','.join(map(str, index.offset or ()))}"


def dtype_name(dtype: torch.dtype) -> str:
    """safetensors' name of a dtype."""
    return _NAME_OF[dtype]
