"""The header of a safetensors file: where each tensor lies, checked against the file's length. No torch.

The format: 8 bytes that say the length of the header, little-endian; the header, a JSON object; the tensors' bytes,
one after the other without a gap.

The decision a reader will question: the library safetensors, which the checkpoints use, checks the same but tells no
offsets, and maps a file into memory, where all that was ever read counts as resident. So the header is read here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NoReturn, TypeGuard

# Bits of an element, by the format's names.
DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "F64": 64,
        "I64": 64,
        "U64": 64,
        "C64": 64,
        "F32": 32,
        "I32": 32,
        "U32": 32,
        "F16": 16,
        "BF16": 16,
        "I16": 16,
        "U16": 16,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E5M2FNUZ": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E8M0": 8,
        "I8": 8,
        "U8": 8,
        "BOOL": 8,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "F4": 4,
    }
)

LENGTH_BYTES = 8
# As the library has it: no model's header comes near.
_LARGEST_HEADER_BYTES = 100_000_000
_LARGEST_NUMBER = 2**63 - 1


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
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _refuse(path, f"{name!r} has dtype {str(dtype)[:40]!r}, which the format does not have")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse(path, f"{name!r} has shape {str(shape)[:60]} and data_offsets {str(offsets)[:60]}")
    num_bits = DTYPE_BITS[dtype]
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
