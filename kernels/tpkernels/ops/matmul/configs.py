"""How a matmul is cut into tiles, by its sizes, dtype and target: where tuned.py knows none for the GPU that is here.

The decision a reader will question: among the tiles that a target multiplies well, those are chosen that give the
busiest processor the least work, estimated from sizes alone; nothing is timed. So all ranks and runs choose alike.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tpkernels.launch import Target, cdiv


class MatmulConfig(NamedTuple):
    """The tiles of a matmul.

    Attributes:
        block_m, block_n, block_k: rows and columns of a tile of C, and the part of K that is multiplied at a time.
        group_m: tiles in a column before the next column (`tiles.place`).
        num_warps, num_stages: as in triton.
        warp_specialize: some warps load while others multiply. Triton 3.7 compiles this for sm_90 with 4 warps, tiles
            of at most 64 rows and 128 columns, and both operands by TMA. Larger tiles it cuts in two for two groups of
            warps, and then refuses the descriptors made on the host, whose boxes are still whole. If pointers load, it
            aborts the process. With 8 warps it ignores the option. `launch_matmul` passes it on if it compiles.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    warp_specialize: bool = False

    @property
    def may_specialize(self) -> bool:
        """Return whether `warp_specialize` can be compiled for sm_90, given both operands by TMA."""
        return self.block_m <= 64 and self.block_n <= 128 and self.num_warps == 4

    def programs_per_processor(self, item_bytes: int, target: Target) -> int:
        """Return how many programs fit onto a processor together, by shared memory and by registers.

        Programs with 8 warps take all registers if a thread may have 255.
        """
        stage_bytes = (self.block_m + self.block_n) * self.block_k * item_bytes
        return max(1, min(target.shared_memory_bytes // (self.num_stages * stage_bytes), 8 // self.num_warps))


class _Choice(NamedTuple):
    """A configuration, and the speed of its tiles relative to the fastest tiles."""

    config: MatmulConfig
    speed: float


class _Table(NamedTuple):
    """The configurations for one kind of matrix unit.

    Attributes:
        choices: with equal estimates the first is taken.
        fixed: used for all sizes.
        scattered: for an operand that is read element by element, whose addresses take many registers.
    """

    choices: tuple[_Choice, ...]
    fixed: MatmulConfig
    scattered: MatmulConfig


# sm_90's wgmma and sm_100's tcgen05 read their operands from shared memory. Shapes: kraken, triton's tutorials.
HOPPER = _Table(
    (
        _Choice(MatmulConfig(128, 256, 64, 4, 8, 3), 1.0),
        _Choice(MatmulConfig(256, 128, 64, 4, 8, 3), 1.0),
        _Choice(MatmulConfig(128, 128, 64, 8, 4, 3), 0.85),
        _Choice(MatmulConfig(64, 128, 64, 8, 4, 4), 0.6),
        _Choice(MatmulConfig(64, 64, 64, 8, 4, 4), 0.4),
    ),
    MatmulConfig(128, 128, 64, 8, 4, 3),
    MatmulConfig(64, 64, 32, 8, 4, 3),
)
# mma.sync: operands and sums are all in registers, so 128x256 spills if A is stored by columns.
AMPERE = _Table(
    (
        _Choice(MatmulConfig(128, 128, 32, 8, 8, 4), 1.0),
        _Choice(MatmulConfig(64, 128, 32, 8, 4, 4), 0.8),
        _Choice(MatmulConfig(64, 64, 32, 8, 4, 4), 0.5),
    ),
    MatmulConfig(128, 128, 32, 8, 8, 4),
    MatmulConfig(64, 64, 32, 8, 4, 3),
)
# gfx942: of two stages one is in the 64 kB of shared memory, the other is in registers, being loaded.
CDNA = _Table(
    (
        _Choice(MatmulConfig(256, 128, 32, 4, 8, 2), 1.0),
        _Choice(MatmulConfig(128, 128, 32, 8, 4, 2), 0.85),
        _Choice(MatmulConfig(64, 128, 32, 8, 4, 2), 0.6),
        _Choice(MatmulConfig(64, 64, 64, 8, 4, 2), 0.4),
    ),
    MatmulConfig(128, 128, 32, 8, 4, 2),
    MatmulConfig(64, 64, 32, 8, 4, 2),
)
# NVIDIA has no matrix units for full float32, and each product is one instruction: larger tiles take minutes to
# compile.
FLOAT32 = _Table(
    (
        _Choice(MatmulConfig(64, 64, 16, 8, 8, 2), 1.0),
        _Choice(MatmulConfig(32, 32, 16, 8, 4, 2), 0.5),
    ),
    MatmulConfig(64, 64, 16, 8, 8, 2),
    MatmulConfig(64, 64, 16, 8, 8, 2),
)
# SwiGLU: block_n columns of gate and as many of up, so each tile has two sums.
_GATED_HOPPER = _Table(
    (
        _Choice(MatmulConfig(128, 128, 64, 4, 8, 3), 1.0),
        _Choice(MatmulConfig(64, 64, 64, 8, 4, 4), 0.6),
    ),
    MatmulConfig(128, 128, 64, 4, 8, 3),
    MatmulConfig(64, 64, 32, 8, 4, 3),
)
_GATED_AMPERE = _Table(
    (
        _Choice(MatmulConfig(128, 64, 32, 8, 8, 4), 1.0),
        _Choice(MatmulConfig(64, 64, 32, 8, 4, 4), 0.8),
    ),
    MatmulConfig(128, 64, 32, 8, 8, 4),
    MatmulConfig(64, 64, 32, 8, 8, 3),
)
_GATED_CDNA = _Table(
    (
        _Choice(MatmulConfig(128, 64, 32, 8, 4, 2), 1.0),
        _Choice(MatmulConfig(64, 64, 32, 8, 4, 2), 0.7),
    ),
    MatmulConfig(128, 64, 32, 8, 4, 2),
    MatmulConfig(64, 64, 32, 8, 4, 2),
)
_GATED_FLOAT32 = _Table(
    (
        _Choice(MatmulConfig(64, 32, 16, 8, 8, 2), 1.0),
        _Choice(MatmulConfig(32, 32, 16, 8, 4, 2), 0.6),
    ),
    MatmulConfig(64, 32, 16, 8, 8, 2),
    MatmulConfig(64, 32, 16, 8, 8, 2),
)

# Multiply-adds that a processor could do while a tile's first operands arrive and its sums are stored (1 to 2 us).
_TILE_OVERHEAD = 2_000_000


def config_of(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    target: Target,
    *,
    fixed: bool = False,
    gated: bool = False,
    scattered: bool = False,
    num_processors: int = 132,
) -> MatmulConfig:
    """Return the tiles of C[m, n] = A[m, k] @ B[k, n].

    Args:
        dtype: of the operands.
        fixed: use the same tiles for all sizes, so that an element's bits depend on its row of A, its column of B and k
            only.
        gated: for SwiGLU's matmul, where n is the number of columns of the result, half the weight's rows.
        scattered: an operand is read element by element (`Operand.is_scattered`).
        num_processors: processors that share the tiles.

    m and k are rounded to the nearest powers of two: they are numbers of tokens, and a few tokens more or less must not
    cause another compilation.
    """
    table = _table(dtype, target, gated)
    if fixed:
        return table.fixed
    if scattered:
        return table.scattered
    rows, depth = nearest_power_of_2(m), nearest_power_of_2(k)
    # Tiles of which less than half is empty.
    filled = [c for c in table.choices if c.config.block_m < 2 * rows and c.config.block_n < 2 * n]

    def busiest(choice: _Choice) -> float:
        config = choice.config
        rounds = cdiv(cdiv(rows, config.block_m) * cdiv(n, config.block_n), num_processors)
        return rounds * (config.block_m * config.block_n * depth / choice.speed + _TILE_OVERHEAD)

    return min(filled or table.choices[-1:], key=busiest).config


def _table(dtype: torch.dtype, target: Target, gated: bool) -> _Table:
    if dtype.itemsize > 2:
        return _GATED_FLOAT32 if gated else FLOAT32
    if target.backend == "hip":
        return _GATED_CDNA if gated else CDNA
    if 90 <= int(target.arch) < 120:
        return _GATED_HOPPER if gated else HOPPER
    return _GATED_AMPERE if gated else AMPERE


def nearest_power_of_2(size: int) -> int:
    """Return the power of two that is nearest to a size, by its logarithm."""
    return 1 << round(math.log2(max(1, size)))
