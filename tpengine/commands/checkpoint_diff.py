"""`tpengine checkpoint diff`: two checkpoints, weights and moments, tensor by tensor, whatever layouts wrote them.

A tensor is put together from its pieces, so memory is that of the largest one, a few times. Bits are compared: 0 and -0
differ, by no ulp; two NaNs of the same bits do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tpengine.checkpoint.index import Index, TensorEntry, check_file, read_index
from tpengine.checkpoint.storage import SavedBlock, fill
from tpengine.torch_dtypes import TORCH_DTYPES

_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs.

    Attributes:
        name: of the tensor.
        num_elements: how many elements it has.
        num_differing: how many of them have other bits.
        ulps: largest distance, in steps from one number of the dtype to the next.
        value: largest difference; None if not finite.
        kind: how dtype or shape differ, or where it is missing; then nothing is compared.
    """

    name: str
    num_elements: int = 0
    num_differing: int = 0
    ulps: int = 0
    value: float | None = None
    kind: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return the row of a table."""
        if self.kind:
            return self.name, self.kind, "-", "-", "-"
        value = "not finite" if self.value is None else f"{self.value:.3g}"
        return self.name, str(self.num_differing), str(self.num_elements), str(self.ulps), value


def compare(a: Path, b: Path) -> tuple[int, list[TensorDifference]]:
    """Compare two checkpoints.

    Args: a, b: their directories.
    Returns: how many tensors there are in either; those that differ, by name.
    Raises: CheckpointError: one of them is damaged, or cannot be read.
    Cost: every file is read twice: for its hash, and for its tensors.
    """
    indices = read_index(a), read_index(b)
    for directory, index in zip((a, b), indices, strict=True):
        for name, entry in sorted(index.files.items()):
            check_file(directory, name, entry)
    names = sorted(indices[0].tensors.keys() | indices[1].tensors.keys())
    compared = (_compare_tensor(name, (a, b), indices) for name in names)
    return len(names), [found for found in compared if found is not None]


def _compare_tensor(name: str, directories: tuple[Path, Path], indices: tuple[Index, Index]) -> TensorDifference | None:
    entries = [index.tensors.get(name) for index in indices]
    kinds = ["missing" if entry is None else f"{entry.dtype} {list(entry.shape)}" for entry in entries]
    if kinds[0] != kinds[1]:
        return TensorDifference(name, kind=f"{kinds[0]}, {kinds[1]}")
    x, y = (
        _whole(name, entry, directory, index)
        for entry, directory, index in zip(entries, directories, indices, strict=True)
        if entry is not None
    )
    bits_x, bits_y = (t.view(_INTEGER_OF_SIZE[t.element_size()]) for t in (x, y))
    differs = bits_x != bits_y
    if not differs.any():
        return None
    x, y, bits_x, bits_y = (t[differs] for t in (x, y, bits_x, bits_y))
    if not x.dtype.is_floating_point:
        ulps = _largest_distance(x.long().numpy(), y.long().numpy())
        return TensorDifference(name, differs.numel(), len(x), ulps, float(ulps))
    ulps = _largest_distance(_ordered(bits_x), _ordered(bits_y))
    value = (x.double() - y.double()).abs().max().item()
    return TensorDifference(name, differs.numel(), len(x), ulps, value if math.isfinite(value) else None)


def _whole(name: str, entry: TensorEntry, directory: Path, index: Index) -> Tensor:
    tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.dtype])
    fill(directory, index, {name: SavedBlock.whole(tensor)})
    return tensor


def _ordered(bits: Tensor) -> NDArray[np.int64]:
    """Return integers in the order of the floats that have these bits: neighbours differ by one, 0 and -0 by none."""
    lowest = torch.iinfo(bits.dtype).min
    wide = bits.long()
    # A negative float is a sign bit and a magnitude: the larger the magnitude, the smaller it is.
    ordered: NDArray[np.int64] = torch.where(wide < 0, lowest - wide, wide).numpy()
    return ordered


def _largest_distance(x: NDArray[np.int64], y: NDArray[np.int64]) -> int:
    # Unsigned: the distance of two int64 may need 64 bits.
    return int((np.maximum(x, y).view(np.uint64) - np.minimum(x, y).view(np.uint64)).max())
