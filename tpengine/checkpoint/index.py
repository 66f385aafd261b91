"""The index of a checkpoint: which piece of which tensor is in which file, and what else a run needs. No torch.

`index.json` is one object: the index itself, and the SHA-256 of its canonical text. So an index that was cut or altered
is noticed before anything in it is used. The index lists the files with their sizes and hashes. Everything is
validated: types, file names without directories, pieces that cover their tensor exactly once.

There are two kinds of errors. DamagedCheckpoint: the checkpoint is not what was written, and an older one may be used
instead. Any other CheckpointError: the checkpoint is whole but cannot be used here; no other may silently replace it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

INDEX_FILE = "index.json"
_FORMAT, _VERSION = "tpengine checkpoint", 1
# Along which pieces of a tensor may be cut; a box has two corners for each.
_MOST_CUT_DIMS = 8
# safetensors' names.
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# What a file system reports for a file that is gone or a disk that fails. Other errors (permissions, too many open
# files) can be corrected without losing the checkpoint.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO, errno.EBADMSG)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: the rule, the file and values, the remedy, in one line."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is not what was written: the rule, the file and values. The remedy is an older checkpoint."""


@dataclass(frozen=True)
class SavedPiece:
    """A block of a global tensor, as the index lists it.

    Attributes:
        offset, shape: of the block in the tensor.
        file, key: where its bytes are.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True)
class TensorEntry:
    """A global tensor: dtype (safetensors' name), shape, and the pieces that make it up."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[SavedPiece, ...]


@dataclass(frozen=True)
class FileEntry:
    """A file of the checkpoint: its size and the SHA-256 of its bytes."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps done.
        tensors, files: by name.
        state: all that is not a tensor, as JSON: configuration, data position, seed.
    """

    step: int
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]
    state: Mapping[str, Any]


def write_index(directory: Path, index: Index) -> None:
    """Write and sync `directory`/index.json."""
    body = {"format": _FORMAT, "version": _VERSION, **asdict(index)}
    with (directory / INDEX_FILE).open("wb") as file:
        file.write(_sealed(body))
        file.flush()
        os.fsync(file.fileno())


def read_index(directory: Path) -> Index:
    """Read and validate the index of a checkpoint, and check that its files exist with the right sizes.

    `check_file` checks their hashes.

    Raises:
        DamagedCheckpoint: no index, an index that was cut or altered, a missing or cut file.
        CheckpointError: an index of another version, or one that this user may not read.
    """
    index = read_index_alone(directory)
    for name, entry in index.files.items():
        _check_size(directory / name, entry)
    return index


def read_index_alone(directory: Path) -> Index:
    """As `read_index`, but without a look at the files that the index lists."""
    path = directory / INDEX_FILE
    try:
        if stat.S_ISFIFO(path.stat().st_mode):  # reading a pipe would block
            raise DamagedCheckpoint(f"a checkpoint's index must be a regular file: {path} is not a regular file")
        raw = path.read_bytes()
    except OSError as error:
        raise unreadable("a checkpoint needs a readable index", path, error) from None
    try:
        body = json.loads(raw)["index"]
        is_sealed = raw == _sealed(body)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedCheckpoint(f"a checkpoint's index must be whole: {path}: cut short or altered") from None
    if not is_sealed:
        raise DamagedCheckpoint(f"a checkpoint's index must match its own hash: {path}: altered")
    try:
        _check_version(path, body)
        index = _parse(body)
    except CheckpointError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise DamagedCheckpoint(f"a checkpoint's index must be well-formed: {path}: {reason}") from None
    return index


def merged(written: Sequence[Mapping[str, Any]]) -> tuple[dict[str, TensorEntry], dict[str, FileEntry]]:
    """Merge what all ranks have written: the tensors with all their pieces, and the files.

    Args:
        written: by rank {"tensors": name -> TensorEntry, "files": name -> FileEntry}, both as JSON.

    Raises:
        ValueError: ranks differ in a tensor's dtype or shape, or the pieces do not cover their tensor exactly once.
    """
    files: dict[str, Any] = {}
    tensors: dict[str, dict[str, Any]] = {}
    for rank, of_rank in enumerate(written):
        files.update(of_rank["files"])
        for name, entry in of_rank["tensors"].items():
            so_far = tensors.setdefault(name, {**entry, "pieces": []})
            kind, first_kind = ((tensor["dtype"], tensor["shape"]) for tensor in (entry, so_far))
            if kind != first_kind:
                raise ValueError(
                    f"all ranks must save the same tensors: rank {rank} has {name} as {kind}, another as {first_kind}: "
                    "start every rank with the same version and command line"
                )
            so_far["pieces"] += entry["pieces"]
    parsed = _files(files)
    return {name: _tensor(name, entry, parsed) for name, entry in tensors.items()}, parsed


def hash_file(path: Path) -> FileEntry:
    """Return size and SHA-256 of a file, from reading it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(file.tell(), digest)


def check_file(directory: Path, name: str, entry: FileEntry) -> None:
    """Check that a file's bytes are those that were written.

    Raises:
        DamagedCheckpoint: they are not.
        CheckpointError: this user may not read them.
    """
    _check_size(directory / name, entry)
    try:
        is_whole = hash_file(directory / name) == entry
    except OSError as error:
        raise unreadable("a checkpoint's files must be readable", directory / name, error) from None
    if not is_whole:
        raise DamagedCheckpoint(f"a checkpoint's files must match their hashes: {directory / name}: altered")


def unreadable(rule: str, path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file of a checkpoint that cannot be read: damage if the file is gone or the disk fails."""
    text = f"{rule}: {path}: {error.strerror or error}"
    if error.errno in _DAMAGE or isinstance(error, FileNotFoundError):
        return DamagedCheckpoint(text)
    return CheckpointError(f"{text}: make it readable for this user and start again")


def _check_size(path: Path, entry: FileEntry) -> None:
    try:
        status = path.lstat()
    except OSError as error:
        raise unreadable("a checkpoint needs all its files", path, error) from None
    size = status.st_size
    if not stat.S_ISREG(status.st_mode):
        raise DamagedCheckpoint(f"a checkpoint's files must be regular files: {path} is not a regular file")
    if size != entry.num_bytes:
        raise DamagedCheckpoint(
            f"a checkpoint's files must have their size: {path} has {size} bytes, the index says {entry.num_bytes}"
        )


def _sealed(body: Any) -> bytes:
    """Return the bytes of an index: the hash of its canonical text, then that text; there is only one such spelling."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f'{{"sha256": "{digest}",\n"index": {text}}}\n'.encode()


def _check_version(path: Path, body: Mapping[str, Any]) -> None:
    if body["format"] != _FORMAT or body["version"] != _VERSION:
        raise CheckpointError(
            f"a checkpoint must be of a format that can be read: {path} has format {body['format']!r} version "
            f"{body['version']!r}, this tpengine reads {_FORMAT!r} {_VERSION}: use the tpengine that wrote it"
        )


def _parse(body: Mapping[str, Any]) -> Index:
    files = _files(body["files"])
    tensors = {name: _tensor(name, entry, files) for name, entry in body["tensors"].items()}
    (step,) = _naturals([body["step"]])
    if not isinstance(body["state"], dict):
        raise ValueError("state is not an object")
    return Index(step, tensors, files, body["state"])


def _files(entries: Mapping[str, Any]) -> dict[str, FileEntry]:
    files = {}
    for name, entry in entries.items():
        if not _FILE_NAME.fullmatch(name) or name == INDEX_FILE:
            raise ValueError(f"file name {name!r} is not a plain name")
        (num_bytes,) = _naturals([entry["num_bytes"]])
        files[name] = FileEntry(num_bytes, str(entry["sha256"]))
    return files


def _tensor(name: str, entry: Mapping[str, Any], files: Mapping[str, FileEntry]) -> TensorEntry:
    shape = _naturals(entry["shape"])
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"tensor {name!r} has dtype {entry['dtype']!r}, which is not one of {' '.join(DTYPES)}")
    pieces = tuple(
        SavedPiece(_naturals(piece["offset"]), _naturals(piece["shape"]), str(piece["file"]), str(piece["key"]))
        for piece in entry["pieces"]
    )
    for piece in pieces:
        if piece.file not in files:
            raise ValueError(f"tensor {name!r} has a piece in {piece.file!r}, which is not a file of the checkpoint")
        inside = len(piece.offset) == len(piece.shape) == len(shape) and all(
            start + size <= whole for start, size, whole in zip(piece.offset, piece.shape, shape, strict=True)
        )
        if not inside:
            raise ValueError(f"tensor {name!r} {shape} has a piece of {piece.shape} at {piece.offset}")
    if not _cover_once(pieces, shape):
        raise ValueError(f"the pieces of tensor {name!r} do not cover it exactly once")
    return TensorEntry(entry["dtype"], shape, pieces)


def _cover_once(pieces: Sequence[SavedPiece], shape: tuple[int, ...]) -> bool:
    """Return whether boxes inside a tensor cover it exactly once, in time linear in their number.

    The number of boxes that cover each element is a sum of boxes' indicators. An indicator is known by its corners,
    each with a sign: 1 where a box begins, -1 where it ends, the product of these over the dims. So the boxes cover
    everything once if and only if their signed corners add up to those of the whole tensor.

    Raises:
        ValueError: boxes have more corners than any that this package writes.
    """
    # Where no box is cut, all have the same corners. An empty box has none: those where it begins and ends cancel.
    boxes = [piece for piece in pieces if 0 not in piece.shape]
    cut = [dim for dim, size in enumerate(shape) if any(piece.shape[dim] != size for piece in boxes)]
    if len(cut) > _MOST_CUT_DIMS:
        raise ValueError(f"pieces are cut along {len(cut)} dims: none is cut along more than {_MOST_CUT_DIMS}")
    sums: defaultdict[int, int] = defaultdict(int)
    for piece in boxes:
        _add_corners(sums, [(piece.offset[dim], piece.shape[dim], shape[dim]) for dim in cut], 1)
    if 0 not in shape:
        _add_corners(sums, [(0, shape[dim], shape[dim]) for dim in cut], -1)
    return not any(sums.values())


def _add_corners(sums: dict[int, int], intervals: Sequence[tuple[int, int, int]], sign: int) -> None:
    """Add a box's corners, numbered over the tensor; `intervals`: begin, size and the tensor's size, by dim."""
    corners = [(0, sign)]
    for begin, size, whole in intervals:
        rows = [(corner * (whole + 1) + begin, its_sign) for corner, its_sign in corners]
        corners = rows + [(corner + size, -its_sign) for corner, its_sign in rows]
    for corner, its_sign in corners:
        sums[corner] += its_sign


def _naturals(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values!r} are not natural numbers")
    return tuple(values)
