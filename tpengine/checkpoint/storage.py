"""Blocks as files: one safetensors file per rank and a JSON index; nothing is pickled, on disk or between ranks.

A rank's block of a global tensor is what it saves, and what it loads into. DTensor is not used: it cuts a dim as
torch.chunk does. A vocabulary whose padding is not stored, and a KV head that several ranks hold, are cut otherwise.

A rank writes its blocks into one file, which is hashed meanwhile, so that no byte of it is read again, and describes
it as JSON. The first rank merges the descriptions into the index, writes the index last, and renames the checkpoint to
its final name.

The decision a reader will question: torch.distributed.checkpoint is not used. Its planners exchange by pickle who
writes and reads what. Here that follows from the blocks and the index alone.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tpengine.checkpoint.directory import CheckpointDirectory, Retention
from tpengine.checkpoint.index import (
    DamagedCheckpoint,
    FileEntry,
    Index,
    SavedPiece,
    TensorEntry,
    merged,
    unreadable,
    write_index,
)
from tpengine.tensor_file import header_of, write_tensors
from tpengine.torch_dtypes import FILE_NAME_OF, memory_of


@dataclass(frozen=True)
class SavedBlock:
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
    def whole(cls, tensor: Tensor, *, stored: bool = True) -> SavedBlock:
        """Return the block of a tensor that every rank holds whole."""
        return cls(tensor, (0,) * tensor.dim(), tuple(tensor.shape), stored)


@dataclass(frozen=True)
class Blocks:
    """Several blocks of one global tensor, on one rank."""

    parts: tuple[SavedBlock, ...]


def parts_of(entry: SavedBlock | Blocks) -> tuple[SavedBlock, ...]:
    """Return the blocks of an entry, one or several."""
    return entry.parts if isinstance(entry, Blocks) else (entry,)


class Writer:
    """Writes one checkpoint.

    Args:
        directory: the run's checkpoints.
        step: optimizer steps done.
        state: all that is not a tensor, as JSON; the first rank's is written.
        keep: how many checkpoints to keep, this one included.
        besides: which of the run's checkpoints stay besides those, by their steps; None for no others.
        told: called on the first rank once the checkpoint is complete, before older ones are removed; returns the
            steps of those that must stay for now.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        step: int,
        state: Mapping[str, Any],
        keep: int,
        besides: Retention | None = None,
        told: Callable[[int], Collection[int]] | None = None,
    ) -> None:
        self._directory, self._step, self._state, self._keep = directory, step, state, keep
        self._besides, self._told = besides or Retention(), told

    def write(self, name: str, blocks: Mapping[str, Blocks]) -> dict[str, Any]:
        """Write a rank's blocks into the file `name`; without blocks write no file.

        Returns:
            What the first rank needs for `finish`, as JSON.
        """
        if not blocks:
            return {"tensors": {}, "files": {}}
        tensors, contents = {}, {}
        for tensor_name, entry in blocks.items():
            pieces = []
            for part in entry.parts:
                key = _key(tensor_name, part)
                contents[key] = part.tensor
                pieces.append(SavedPiece(part.offset, tuple(part.tensor.shape), name, key))
            first = entry.parts[0]
            described = TensorEntry(FILE_NAME_OF[first.tensor.dtype], first.global_shape, tuple(pieces))
            tensors[tensor_name] = asdict(described)
        path = self._directory.begin(self._step) / name
        return {"tensors": tensors, "files": {name: asdict(self._write(path, contents))}}

    def _write(self, path: Path, contents: dict[str, Tensor]) -> FileEntry:
        entry = save_file(contents, path)
        # All who may read the directory may read its files, whatever the umask of this process.
        path.chmod(path.parent.stat().st_mode & 0o666)
        return entry

    def finish(self, written: Sequence[Mapping[str, Any]]) -> str:
        """Complete the checkpoint: on the first rank, once every rank has written.

        Args:
            written: the result of `write` on each rank, by rank.

        Returns:
            Why old checkpoints could not be removed; empty if they were. The new one is complete either way.

        Raises:
            ValueError: what the ranks have written is not a complete checkpoint.
            OSError: a rank's file is not there, or the index cannot be written.
        """
        tensors, files = merged(written)
        beside = self._directory.begin(self._step)
        for name, entry in files.items():  # another node may have written to a local disk
            if (beside / name).stat().st_size != entry.num_bytes:
                raise OSError(f"{name} is not what its rank has written")
        write_index(beside, Index(self._step, tensors, files, self._state))
        self._directory.complete(self._step)
        spared = self._told(self._step) if self._told is not None else ()
        return self._besides.remove_others(self._directory, self._keep, spared)


def save_file(contents: Mapping[str, Tensor], path: Path) -> FileEntry:
    """Write tensors to a safetensors file, as the library does, and have them on disk.

    Args:
        contents: contiguous tensors on the host, by their names in the file.
        path: of the file; one that is there is replaced.

    Returns:
        Its size and SHA-256, computed from what was handed to the system.

    Raises:
        OSError: it cannot be written; a part of it may be left.
    """
    # In the library's order, widest first: so every tensor is aligned to its own elements.
    places = {dtype: place for place, dtype in enumerate(FILE_NAME_OF)}
    ordered = sorted(contents.items(), key=lambda item: (places[item[1].dtype], item[0]))
    header = header_of((name, FILE_NAME_OF[tensor.dtype], tensor.shape) for name, tensor in ordered)
    digest = hashlib.sha256()
    num_bytes = write_tensors(path, header, (memory_of(tensor) for _, tensor in ordered), digest)
    return FileEntry(num_bytes, digest.hexdigest())


def fill(directory: Path, index: Index, blocks: Mapping[str, SavedBlock | Blocks]) -> None:
    """Read a rank's blocks from a checkpoint whose files have been checked (load.py).

    Args:
        directory: of the checkpoint.
        index: the checkpoint's; it has every tensor of `blocks`, with the same dtypes and shapes.
        blocks: empty ones read nothing.

    Raises:
        DamagedCheckpoint: a file cannot be read, or does not hold what the index says.
    """
    by_file: dict[str, list[tuple[str, SavedBlock, SavedPiece]]] = defaultdict(list)
    for name, entry in blocks.items():
        for part in parts_of(entry):
            for piece in index.tensors[name].pieces:
                if all(start < end for start, end in _common(part, piece)):
                    by_file[piece.file].append((name, part, piece))
    for file_name, wanted in by_file.items():
        _read_file(directory / file_name, index, wanted)


def _read_file(path: Path, index: Index, wanted: Sequence[tuple[str, SavedBlock, SavedPiece]]) -> None:
    try:
        with safe_open(str(path), framework="pt") as file:
            for name, part, piece in wanted:
                source = file.get_slice(piece.key)
                expected = (index.tensors[name].dtype, list(piece.shape))
                if (source.get_dtype(), source.get_shape()) != expected:
                    raise SafetensorError(f"{piece.key} is not {expected[0]}{expected[1]}")
                common = tuple(_common(part, piece))
                if not common:
                    part.tensor.detach().copy_(file.get_tensor(piece.key))
                    continue
                inside = _slices(common, piece.offset)
                part.tensor.detach()[_slices(common, part.offset)].copy_(source[inside])
    except SafetensorError as error:
        raise DamagedCheckpoint(f"a checkpoint's files must hold what its index says: {path}: {error}") from None
    except OSError as error:
        raise unreadable("a checkpoint's files must be readable", path, error) from None


def _common(part: SavedBlock, piece: SavedPiece) -> Iterator[tuple[int, int]]:
    """Yield by dim where a block and a stored piece overlap in the global tensor; end <= begin means not at all."""
    for a, n, b, m in zip(part.offset, part.tensor.shape, piece.offset, piece.shape, strict=True):
        yield max(a, b), min(a + n, b + m)


def _slices(bounds: Sequence[tuple[int, int]], offset: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start - at, end - at) for (start, end), at in zip(bounds, offset, strict=True))


def _key(name: str, block: SavedBlock) -> str:
    """Return a block's name in a file: tensor and offset, since a rank may hold several blocks of one tensor."""
    return f"{name}@{','.join(map(str, block.offset))}"
