"""Slices: how flat buckets are cut over data-parallel replicas (ZeRO), and which parts of which tensors a slice holds.

    fast     a bucket of n elements, padded to d * s:    replica i of d owns elements [i s, (i + 1) s)
    exact    each tensor by itself, at borders of its blocks of BLOCK elements; what begins a tensor goes to the
             replicas in turns, so that small tensors do not all lie on the first

Exact mode's cut keeps every sum in blocks whole, and the elements that a vectorised optimizer computes together.

Torch-free, so that every rank can compute what all hold, and the plan's bytes are known before anything runs.
Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", SC 2020.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from tpengine.config.exact_sizes import BLOCK as BLOCK
from tpengine.config.settings import round_up
from tpengine.layout.parameters import ALIGNMENT_BYTES, BucketLayout

# Every slice begins at a cache line, in float32 and wider.
_ALIGNMENT = ALIGNMENT_BYTES // 4


@dataclass(frozen=True)
class SlicePart:
    """What a slice holds of one tensor of its bucket.

    Attributes:
        name: the tensor's.
        in_slice, in_tensor: where its elements lie, in the slice and in the flat tensor.
    """

    name: str
    in_slice: slice
    in_tensor: slice


def slice_numel(layout: BucketLayout, num_slices: int) -> int:
    """Return the elements of each replica's slice of a bucket, padding included."""
    return round_up(layout.numel, num_slices * _ALIGNMENT) // num_slices


def parts_of(layout: BucketLayout, num_slices: int, owner: int) -> Iterator[SlicePart]:
    """Yield what the slice of replica `owner` holds, in the order of the bucket's tensors; padding is part of none."""
    size = slice_numel(layout, num_slices)
    first, end = owner * size, (owner + 1) * size
    offsets = accumulate(layout.numels, initial=0)
    for name, numel, offset in zip(layout.names, layout.numels, offsets, strict=False):
        begin, stop = max(first, offset), min(end, offset + numel)
        if begin < stop:
            yield SlicePart(name, slice(begin - first, stop - first), slice(begin - offset, stop - offset))


@dataclass(frozen=True)
class BlockCut:
    """How one tensor is cut over replicas at borders of its blocks.

    Attributes:
        numel: of the tensor.
        num_slices: replicas.
        first: the replica that owns the tensor's beginning.
    """

    numel: int
    num_slices: int
    first: int

    @classmethod
    def of(cls, name: str, numel: int, num_slices: int) -> BlockCut:
        """Return the cut of a tensor, whose name decides where it begins; the same wherever the tensor is held."""
        return cls(numel, num_slices, zlib.crc32(name.encode()) % num_slices)

    @property
    def size(self) -> int:
        """Return the elements that every replica makes room for."""
        return -(-self.numel // (BLOCK * self.num_slices)) * BLOCK

    def owned_by(self, replica: int) -> slice:
        """Return the elements of the tensor that a replica owns; empty where there are none left for it."""
        number = (replica - self.first) % self.num_slices
        return slice(min(number * self.size, self.numel), min((number + 1) * self.size, self.numel))


@dataclass(frozen=True)
class BucketCut:
    """How a bucket is cut over replicas (ZeRO).

        packed[R, S]: row i is the slice of replica i

    Attributes:
        layout: the bucket.
        num_slices: R, replicas.
        blocks: by tensor's name, its own cut at borders of blocks (exact mode); a slice has the tensors' parts behind
            each other. None cuts the bucket as it lies: `packed` is the bucket itself, with padding behind it.
    """

    layout: BucketLayout
    num_slices: int
    blocks: Mapping[str, BlockCut] | None = None

    @property
    def size(self) -> int:
        """Return S, the elements of a slice, padding included."""
        if self.blocks is None:
            return slice_numel(self.layout, self.num_slices)
        return sum(self.blocks[name].size for name in self.layout.names)

    @property
    def numel(self) -> int:
        """Return the elements of the bucket, with the padding that the cut needs in it."""
        return self.layout.numel if self.blocks is not None else self.num_slices * self.size

    def parts(self, owner: int) -> Iterator[SlicePart]:
        """Yield what the slice of replica `owner` holds, in the order of the bucket's tensors."""
        if self.blocks is None:
            yield from parts_of(self.layout, self.num_slices, owner)
            return
        offset = 0
        for name in self.layout.names:
            owned = self.blocks[name].owned_by(owner)
            if owned.start < owned.stop:
                yield SlicePart(name, slice(offset, offset + owned.stop - owned.start), owned)
            offset += self.blocks[name].size


@dataclass(frozen=True)
class Box:
    """Neighbouring elements of a tensor that form a rectangle.

    Attributes:
        within: which of the given elements they are.
        offset, size: of the rectangle in the tensor.
    """

    within: slice
    offset: tuple[int, ...]
    size: tuple[int, ...]


def boxes_of(shape: tuple[int, ...], elements: slice) -> Iterator[Box]:
    """Cut a run of elements of a tensor into boxes: of two dims at most three, two more for each further one.

    The end of a row, whole rows, the beginning of a row; what is empty is left out. A row of three dims is a matrix,
    whose part is cut alike.
    """
    begin, end = elements.start, elements.stop
    if len(shape) == 1:
        yield Box(slice(0, end - begin), (begin,), (end - begin,))
        return
    inner, place = shape[1:], begin
    width = math.prod(inner)
    while place < end:
        row, column = divmod(place, width)
        first = place - begin
        if column == 0 and end - place >= width:
            num_rows = (end - place) // width
            numel = num_rows * width
            yield Box(slice(first, first + numel), (row, *(0 for _ in inner)), (num_rows, *inner))
        else:
            numel = min(width - column, end - place)
            for box in boxes_of(inner, slice(column, column + numel)):
                within = slice(first + box.within.start, first + box.within.stop)
                yield Box(within, (row, *box.offset), (1, *box.size))
        place += numel
