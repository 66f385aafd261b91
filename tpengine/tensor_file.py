"""A safetensors file: its header, checked against the file's length, and its writing as bytes come. No torch.

The format: 8 bytes that say the length of the header, little-endian; the header, a JSON object; the tensors' bytes,
one after the other without a gap.

The decision a reader will question: the library safetensors checks and writes such files too, byte for byte the same.
But it tells no offsets, and maps a file into memory, where all that was ever read counts as resident; it wants a file's
tensors whole; and it tells nobody what it writes, so who hashes its file reads all of it again, from a shared directory
perhaps over the network. Where a piece of a known file is wanted, it is used (checkpoint/storage.py).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeGuard

from tpengine.dtypes import FILE_BITS

LENGTH_BYTES = 8
# As the library has it: no model's header comes near.
_LARGEST_HEADER_BYTES = 100_000_000
_LARGEST_NUMBER = 2**63 - 1
# What is hashed and then written at once: hashed bytes are still in a core's cache when they are copied.
_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a file.

    Attributes:
        path: the file.
        dtype: by the format's name, such as BF16.
        shape: as stored.
        begin: where its bytes begin in the file.
        num_bytes: from there on.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


def read_header(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of a safetensors file by name.

    Raises:
        ValueError: the file cannot be read, is truncated, or its header is not what the format demands.
    """
    try:
        with path.open("rb") as file:
            return _tensors(path, *_read(path, file))
    except OSError as error:
        raise ValueError(f"weights must be readable: {path}: {error.strerror}: check the file") from None


def header_of(tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the length and the header of a file.

    Args:
        tensors: unique name, dtype by the format's name, and shape of each, in the order in which they lie in the file.
            Who maps it wants those of wider dtypes first, so that each begins at a multiple of its element's size.
        metadata: of the file; None for none.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * FILE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Padded, so that the values begin at a multiple of 8.
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def write_tensors(path: Path, header: bytes, values: Iterable[memoryview], digest: Any = None) -> int:
    """Write a safetensors file, and have it on disk; one that is there is replaced.

    Args:
        path: of the file.
        header: from header_of.
        values: bytes of the tensors, in the header's order, in blocks of any size.
        digest: hash to update with all that is handed to the system, of hashlib; None for none.

    Returns:
        Bytes of the file.

    Raises:
        OSError: it cannot be written; a part of it may be left.

    Cost: no memory but that of one block.
    """
    with path.open("wb", buffering=0) as file:
        num_bytes = _put(file, memoryview(header), digest)
        for block in values:
            num_bytes += _put(file, block, digest)
        os.fsync(file.fileno())
    return num_bytes


def _put(file: BinaryIO, content: memoryview, digest: Any) -> int:
    """Hash and write bytes; both let other threads run meanwhile."""
    for begin in range(0, len(content), _CHUNK_BYTES):
        chunk = content[begin : begin + _CHUNK_BYTES]
        if digest is not None:
            digest.update(chunk)
        while len(chunk):
            # A disk that becomes full takes a part, and the next call says why.
            chunk = chunk[file.write(chunk) :]
    return len(content)


def _read(path: Path, file: BinaryIO) -> tuple[Any, int, int]:
    """Return the parsed header, where the tensors' bytes begin, and where the file ends."""
    file_bytes = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    if file_bytes < LENGTH_BYTES:
        _truncated(path, f"{file_bytes} bytes, of which a header's length takes {LENGTH_BYTES}")
    if length > _LARGEST_HEADER_BYTES:
        _refuse(path, f"its header would be {length} bytes long, the format allows {_LARGEST_HEADER_BYTES}")
    if LENGTH_BYTES + length > file_bytes:
        _truncated(path, f"{file_bytes} bytes, its header alone takes {LENGTH_BYTES + length}")
    try:
        parsed = json.loads(file.read(length).decode(), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        _refuse(path, f"its header is not valid JSON ({reason[:120]!r})")
    return parsed, LENGTH_BYTES + length, file_bytes


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in found if names.count(name) > 1)!r} twice")
    return found


def _tensors(path: Path, parsed: Any, data_begin: int, file_bytes: int) -> dict[str, FileTensor]:
    if not isinstance(parsed, dict):
        _refuse(path, f"its header is not an object but {type(parsed).__name__}")
    parsed.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry, data_begin) for name, entry in parsed.items()}
    end = data_begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].num_bytes)):
        if tensor.begin != end:
            _refuse(path, f"{name!r} begins at byte {tensor.begin}, where {end} is due without gap or overlap")
        end += tensor.num_bytes
    if end > file_bytes:
        _truncated(path, f"{file_bytes} bytes, its header speaks of {end}")
    if end < file_bytes:
        _refuse(path, f"it has {file_bytes} bytes, of which its tensors take only {end}")
    return tensors


def _tensor(path: Path, name: str, entry: Any, data_begin: int) -> FileTensor:
    if not isinstance(entry, dict):
        _refuse(path, f"{name!r} is not an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in FILE_BITS:
        _refuse(path, f"{name!r} has dtype {str(dtype)[:40]!r}, which the format does not have")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse(path, f"{name!r} has shape {str(shape)[:60]} and data_offsets {str(offsets)[:60]}")
    num_bits = FILE_BITS[dtype]
    for size in shape:
        num_bits = min(num_bits * size, 8 * _LARGEST_NUMBER)
    num_bytes = offsets[1] - offsets[0]
    if num_bits != 8 * num_bytes:
        _refuse(path, f"{name!r} {dtype}{shape!s:.60} does not take the {num_bytes} bytes that it has")
    return FileTensor(path, dtype, tuple(shape), data_begin + offsets[0], num_bytes)


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _LARGEST_NUMBER for value in values)


def _truncated(path: Path, what: str) -> NoReturn:
    raise ValueError(f"a safetensors file must be whole: {path} has {what}: copy it again")


def _refuse(path: Path, what: str) -> NoReturn:
    raise ValueError(f"a safetensors file must be as its format demands: {path}: {what}: copy it again")
