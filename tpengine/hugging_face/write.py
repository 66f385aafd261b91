"""Write a directory of weights: safetensors files of at most 5 GB and their index, a block of rows at a time.

Which tensor goes into which file is planned from shapes and dtypes, before the first block is asked for. A tensor is
written under each name that it is given with: whether two share their memory is never asked, so none is left out.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tpengine.dtypes import FILE_BITS
from tpengine.hugging_face.directory import INDEX, WEIGHTS
from tpengine.layout.stored import Stored
from tpengine.tensor_file import header_of, write_tensors
from tpengine.torch_dtypes import TORCH_DTYPES, memory_of

LARGEST_FILE_BYTES = 5_000_000_000
# As transformers and torch's tools expect it.
_METADATA = {"format": "pt"}

# Elements of a block: 4 MiB of float64.
BLOCK_ELEMENTS = 2**19

# (offset, size) in a global parameter -> its values there.
ReadParameter = Callable[[tuple[int, ...], tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor of a file to be.

    Attributes:
        name: in the file; unique.
        dtype: by the format's name: F64, F32, F16 or BF16.
        shape: in the file.
        blocks: makes its rows, in order, as tensors of whole rows, or of three dims of parts of one row; called once.
            Blocks are converted to the dtype.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[Tensor]]

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * FILE_BITS[self.dtype] // 8


def write_weights(
    directory: Path, tensors: Sequence[TensorToWrite], largest_file_bytes: int = LARGEST_FILE_BYTES
) -> None:
    """Write tensors into model.safetensors, or into several files with an index.

    Args:
        directory: to write to.
        tensors: in the order in which they are distributed over the files; in a file those of wider dtypes come first.
        largest_file_bytes: of a file, header included, unless one tensor alone is larger.

    Raises:
        ValueError: two tensors of one name.
        OSError: a file cannot be written.

    Cost: one block of memory, and as much again where it is converted.
    """
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"a tensor must be written once: {twice} is named twice: correct the architecture's table")
    files = plan_files(tensors, largest_file_bytes)
    if len(files) == 1:
        write_file(directory / WEIGHTS, files[0])
        return
    weight_map = {}
    for number, held in enumerate(files, start=1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        write_file(directory / file, held)
        weight_map.update({tensor.name: file for tensor in held})
    total = sum(tensor.num_bytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    with (directory / INDEX).open("w", encoding="utf-8") as text:
        text.write(json.dumps(index, indent=2) + "\n")
        text.flush()
        os.fsync(text.fileno())


def plan_files(tensors: Sequence[TensorToWrite], largest_file_bytes: int) -> list[list[TensorToWrite]]:
    """Return the tensors of each file: a file is closed before the tensor that would make it too large.

    Args: see write_weights.
    """
    files: list[list[TensorToWrite]] = [[]]
    # A tensor's part of a header, its offsets as long as they can be, is the same in any file.
    empty = held = len(header_of([], _METADATA)) + 8
    for tensor in tensors:
        entry = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [10**15, 10**15 + tensor.num_bytes]}
        num_bytes = tensor.num_bytes + len(json.dumps({tensor.name: entry}))
        if files[-1] and held + num_bytes > largest_file_bytes:
            files.append([])
            held = empty
        files[-1].append(tensor)
        held += num_bytes
    # Who maps a file wants each tensor to begin at a multiple of its element's size.
    return [sorted(file, key=lambda tensor: -FILE_BITS[tensor.dtype]) for file in files]


def write_file(path: Path, tensors: Sequence[TensorToWrite]) -> None:
    """Write one safetensors file, and have it on disk.

    Args:
        path: of the file.
        tensors: in the order in which they lie in it.

    Raises:
        OSError: it cannot be written.
    """
    header = header_of(((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors), _METADATA)
    write_tensors(path, header, (block for tensor in tensors for block in _bytes_of(tensor)))


def _bytes_of(tensor: TensorToWrite) -> Iterator[memoryview]:
    """Yield a tensor's blocks in its dtype, and see to it that they are all of it."""
    dtype, num_bytes = TORCH_DTYPES[tensor.dtype], 0
    for block in tensor.blocks():
        inner, whole = tuple(block.shape[1:]), tensor.shape[1:]
        is_part = len(block) == 1 and inner[1:] == whole[1:]
        assert inner == whole or is_part, f"{tensor.name} {tensor.shape}: a block has rows of {inner}"
        values = memory_of(block.detach().to("cpu", dtype).contiguous())
        num_bytes += len(values)
        yield values
    assert num_bytes == tensor.num_bytes, f"{tensor.name} {tensor.shape}: blocks have {num_bytes} bytes"


def tensors_to_write(
    parts: Iterable[tuple[Stored, ReadParameter]], dtypes: Mapping[str, str] | str
) -> list[TensorToWrite]:
    """Return the files' tensors that hold these parameters: packed, transposed, apart, without padding rows.

    Args:
        parts: as what each parameter is stored, and how it is read; two parameters may be the same one, under two
            names in the files.
        dtypes: the format's name of each tensor's dtype, by the tensor's name, or of all.

    Raises:
        ValueError: parameters that leave a row of a tensor out, or write it twice.
    """
    by_name: dict[str, list[tuple[Stored, ReadParameter]]] = {}
    for stored, read_parameter in parts:
        for number, of in enumerate(stored.apart()):
            read = partial(_read_one, read_parameter, number) if stored.num_stacked else read_parameter
            by_name.setdefault(of.name, []).append((of, read))
    tensors = []
    for name, held in by_name.items():
        held.sort(key=lambda part: part[0].row_range)
        end = 0
        for stored, _ in held:
            if stored.row_range[0] != end or stored.shape != held[0][0].shape:
                raise ValueError(
                    f"a tensor's rows must each be one parameter's: {name} {list(held[0][0].shape)} is asked to hold "
                    f"rows {stored.row_range[0]} to {stored.row_range[1]} behind row {end}: correct the architecture's "
                    "table"
                )
            end = stored.row_range[1]
        if end != held[0][0].num_file_rows:
            raise ValueError(
                f"a tensor's rows must each be one parameter's: {name} {list(held[0][0].shape)} has rows to {end} "
                "only: correct the architecture's table"
            )
        dtype = dtypes if isinstance(dtypes, str) else dtypes[name]
        tensors.append(TensorToWrite(name, dtype, held[0][0].shape, _BlocksOf(tuple(held))))
    return tensors


def _read_one(read_parameter: ReadParameter, number: int, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    """Return a box of one of the matrices that a parameter stacks."""
    return read_parameter((number, *offset), (1, *size))[0]


@dataclass(frozen=True)
class _BlocksOf:
    """Makes the blocks of a file's tensor out of boxes of the parameters that it holds, in the order of their rows."""

    parts: tuple[tuple[Stored, ReadParameter], ...]

    def __call__(self) -> Iterator[Tensor]:
        first = self.parts[0][0]
        num_rows, row_length = first.matrix
        height = max(1, BLOCK_ELEMENTS // max(1, row_length))
        if first.transposed:
            for row in range(0, num_rows, height):
                columns = (0, row), min(height, num_rows - row)
                yield torch.cat([self._columns(part, *columns) for part in self.parts], dim=1)
            return
        for stored, read_parameter in self.parts:
            begin, end = stored.row_range
            inner = stored.shape[1:]
            if not stored.shape:
                yield read_parameter((), ()).view(1)
            if len(inner) > 1 and row_length > BLOCK_ELEMENTS:
                yield from self._matrices(read_parameter, end - begin, inner)
                continue
            for row in range(0, end - begin, height) if stored.shape else ():
                offset, size = (row, *(0 for _ in inner)), (min(height, end - begin - row), *inner)
                yield read_parameter(offset, size)

    @staticmethod
    def _matrices(read_parameter: ReadParameter, num: int, shape: tuple[int, ...]) -> Iterator[Tensor]:
        """Yield stacked matrices one by one, a block of rows at a time."""
        num_rows, *inner = shape
        height = max(1, BLOCK_ELEMENTS // math.prod(inner))
        for number in range(num):
            for row in range(0, num_rows, height):
                offset = (number, row, *(0 for _ in inner))
                yield read_parameter(offset, (1, min(height, num_rows - row), *inner))

    @staticmethod
    def _columns(part: tuple[Stored, ReadParameter], offset: tuple[int, int], num_columns: int) -> Tensor:
        stored, read_parameter = part
        begin, end = stored.row_range
        return read_parameter(offset, (end - begin, num_columns)).t()
