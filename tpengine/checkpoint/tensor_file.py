"""A safetensors file, hashed while it is written, so that no byte of it is read again.

The decision a reader will question: the library safetensors writes such files too, byte for byte the same, but tells
nobody what it writes. Hashing its file afterwards reads all of it, from a shared directory perhaps over the network.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from tpengine.checkpoint.index import FileEntry

# In the library's order, widest first: so every tensor is aligned to its own elements.
DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.int64: "I64",
        torch.float64: "F64",
        torch.float32: "F32",
        torch.int32: "I32",
        torch.bfloat16: "BF16",
        torch.float16: "F16",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
)
_LENGTH_BYTES = 8
# What is hashed and then written at once: hashed bytes are still in a core's cache when they are copied.
_CHUNK_BYTES = 2**20


def save_file(contents: Mapping[str, Tensor], path: str) -> FileEntry:
    """Write tensors to a safetensors file, and have them on disk.

    Args:
        contents: contiguous tensors on the host, by their names in the file.
        path: of the file; one that is there is replaced.

    Returns:
        Its size and SHA-256, computed from what was handed to the system.

    Raises:
        OSError: it cannot be written; a part of it may be left.
    """
    places = {dtype: place for place, dtype in enumerate(DTYPE_NAMES)}
    ordered = sorted(contents.items(), key=lambda item: (places[item[1].dtype], item[0]))
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // _LENGTH_BYTES) * _LENGTH_BYTES)
    digest = hashlib.sha256()
    with open(path, "wb", buffering=0) as file:
        _put(file, digest, memoryview(len(text).to_bytes(_LENGTH_BYTES, "little") + text))
        for _, tensor in ordered:
            _put(file, digest, tensor.reshape(-1).view(torch.uint8).numpy().data)
        os.fsync(file.fileno())
    return FileEntry(_LENGTH_BYTES + len(text) + end, digest.hexdigest())


def _put(file: BinaryIO, digest: Any, content: memoryview) -> None:
    """Hash and write bytes; both let other threads run meanwhile."""
    for begin in range(0, len(content), _CHUNK_BYTES):
        chunk = content[begin : begin + _CHUNK_BYTES]
        digest.update(chunk)
        while len(chunk):
            # A disk that becomes full takes a part, and the next call says why.
            chunk = chunk[file.write(chunk) :]
