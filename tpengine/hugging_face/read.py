"""Boxes of parameters out of a directory's files: a rank reads what it holds, and nothing else.

Where file and parameter have one dtype and order, a box is read straight into the parameter. Else it is read a region
at a time, at most 4 MiB, into a buffer that is used again, and copied from there; the copy converts the dtype. A box of
whole rows is one read per region; a box of some columns is one read per row of the file, since what lies between is
another rank's. A box of stacked matrices is a box of each. Several boxes are read by several threads: what takes the
time is the system's, page by page of new memory, and torch's copies, which hold no lock of Python's.

The decision a reader will question: the reader of checkpoints (`checkpoint/load.py`) is not used. It maps files, and
makes a tensor of each piece before it copies: both would exceed the memory that an import may take. Nor does it know
tensors that are transposed, packed, or shorter than the parameter. Nor are huge pages asked for: where the system has
free ones they halve the time, where it must make them it takes three times as long (1 GB, AMD EPYC, 2026-11-23).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from tpengine.hugging_face.directory import ModelDirectory, OpenFiles
from tpengine.layout.stored import FileBox, Stored
from tpengine.tensor_file import FileTensor
from tpengine.torch_dtypes import TORCH_DTYPES, memory_of

# Larger is not faster, and a copy out of it is still in a core's cache.
REGION_BYTES = 4 * 2**20
# Each has a buffer of REGION_BYTES.
_MOST_THREADS = 8

# Where a parameter lies, the offset of a box in it, and the tensor that the box fills.
Box = tuple[Stored, tuple[int, ...], Tensor]


class BoxReader:
    """Reads boxes of parameters out of a directory whose tensors have been checked (directory.py); a context manager.

    Attributes:
        source: counts the bytes read.
    """

    def __init__(self, directory: ModelDirectory) -> None:
        self.source = OpenFiles()
        self._tensors = directory.tensors
        self._of_thread = threading.local()

    def __enter__(self) -> BoxReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.source.close()

    def fill_all(self, boxes: Iterable[Box], num_threads: int = 1) -> None:
        """Fill several tensors: see fill.

        Args:
            boxes: what to read; the tensors do not overlap.
            num_threads: that read at the same time; at most 8 are used.

        Raises:
            ValueError: as fill.

        Cost: 4 MiB of memory per thread.
        """
        num_threads = min(num_threads, _MOST_THREADS)
        if num_threads <= 1:
            for box in boxes:
                self.fill(*box)
            return
        # The largest first, so that no thread is left with one of them at the end.
        ordered = sorted(boxes, key=lambda box: -box[2].nbytes)
        computing = torch.get_num_threads()
        # A copy in one of these threads takes that thread alone.
        pool = ThreadPoolExecutor(num_threads, "tpengine-read", torch.set_num_threads, (1,))
        try:
            for _ in pool.map(lambda box: self.fill(*box), ordered):
                pass
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(computing)

    def fill(self, stored: Stored, offset: tuple[int, ...], target: Tensor) -> None:
        """Fill a tensor with a box of a parameter.

        Args:
            stored: where the parameter lies.
            offset: of the box in the global parameter, an entry a dim.
            target: as large as the box; of any dtype, device and strides. Its padding rows become zero.

        Raises:
            ValueError: a file cannot be read or is truncated.

        Cost: the box is read once; 4 MiB of memory, and as much again on the way to another device.
        """
        target = target.detach()
        if stored.num_stacked:
            for number, part in enumerate(stored.apart(offset[0], len(target))):
                self.fill(part, offset[1:], target[number])
            return
        box = stored.file_box(offset, tuple(target.shape))
        tensor = self._tensors[stored.name]
        num_rows = box.num_columns if stored.transposed else box.num_rows
        if num_rows < (target.shape[0] if target.dim() else 1):
            target[num_rows:].zero_()
        matrix = _as_matrix(target, num_rows)
        if stored.transposed:
            matrix = matrix.t()
        dtype = TORCH_DTYPES[tensor.dtype]
        if target.dtype == dtype and target.device.type == "cpu" and matrix.is_contiguous():
            self._read(memory_of(matrix), tensor, stored.matrix[1], box, dtype.itemsize)
            return
        for region in _regions(box, REGION_BYTES // dtype.itemsize):
            values = self._buffered(tensor, stored.matrix[1], region, dtype)
            rows, columns = region.first_row - box.first_row, region.first_column - box.first_column
            matrix[rows : rows + region.num_rows, columns : columns + region.num_columns].copy_(values)

    def read(self, stored: Stored, offset: tuple[int, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a box of a parameter as a new tensor: see fill."""
        target = torch.empty(size, dtype=dtype)
        self.fill(stored, offset, target)
        return target

    def _buffered(self, tensor: FileTensor, row_length: int, region: FileBox, dtype: torch.dtype) -> Tensor:
        """Return a region's values, in this thread's buffer."""
        if not hasattr(self._of_thread, "buffer"):
            self._of_thread.buffer = torch.empty(REGION_BYTES, dtype=torch.uint8)
        num_bytes = region.num_rows * region.num_columns * dtype.itemsize
        values: Tensor = self._of_thread.buffer[:num_bytes]
        self._read(memory_of(values), tensor, row_length, region, dtype.itemsize)
        return values.view(dtype).view(region.num_rows, region.num_columns)

    def _read(self, memory: memoryview, tensor: FileTensor, row_length: int, region: FileBox, itemsize: int) -> None:
        """Read a region, row by row, into memory of its size."""
        first = region.first_row * row_length + region.first_column
        if region.num_columns == row_length or region.num_rows == 1:
            self.source.read_into(memory, tensor.path, tensor.begin + first * itemsize)
            return
        run_bytes = region.num_columns * itemsize
        for row in range(region.num_rows):
            begin = tensor.begin + (first + row * row_length) * itemsize
            self.source.read_into(memory[row * run_bytes : (row + 1) * run_bytes], tensor.path, begin)


def _as_matrix(target: Tensor, num_rows: int) -> Tensor:
    """Return a view of the first rows as a matrix: the first dim, and all others folded into one."""
    if target.dim() == 0:
        return target.view(1, 1)
    if target.dim() == 1:
        return target[:num_rows].unsqueeze(1)
    return target[:num_rows].view(num_rows, math.prod(target.shape[1:]))


def _regions(box: FileBox, num_elements: int) -> Iterator[FileBox]:
    """Yield a box in parts of at most so many elements: of several rows, or of a part of one."""
    if not box.num_rows or not box.num_columns:
        return
    width = min(box.num_columns, num_elements)
    height = max(1, num_elements // width)
    for row in range(0, box.num_rows, height):
        for column in range(0, box.num_columns, width):
            yield FileBox(
                box.first_row + row,
                min(height, box.num_rows - row),
                box.first_column + column,
                min(width, box.num_columns - column),
            )
