"""Tiles of the fused matmuls, as functions of sizes that every rank knows, dtype and target. Not tuned on a GPU yet.

They differ from the plain matmul's (matmul/configs.py). A tile's rows all belong to one rank, so few rows per rank need
low tiles. And every rank must take the same tiles, because a flag stands for whole tiles.

The decision a reader will question: those tiles are taken that give the busiest processor the least work, so a last
round of tiles that most processors have no part in counts in full. The estimate is also what strategy.py predicts a
fused matmul's time by. There are no narrower tiles for the last round alone, and no stream-K: on 8 ranks with 2,048
tokens or more, the scatters of Llama 3 8B and 70B leave 3 % of the processors' rounds unused. Nor is the loop over
tiles flattened into that over K: a program would need its next number before it has computed the tile before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tpkernels.launch import INTERPRETED, Target, cdiv, processors_of
from tpkernels.ops.matmul.configs import MatmulConfig, nearest_power_of_2
from tpkernels.processors import left_free, programs_together


class _Choice(NamedTuple):
    """Tiles, and their speed relative to the fastest ones'."""

    config: MatmulConfig
    speed: float


# For each target from large to small; with equal estimates the first is taken.
_HOPPER = (
    _Choice(MatmulConfig(128, 256, 64, 4, 8, 3), 1.0),
    # 98 kB and at most 248 registers per thread: two programs per processor.
    _Choice(MatmulConfig(128, 128, 64, 8, 4, 3), 0.85),
    _Choice(MatmulConfig(64, 128, 64, 8, 4, 4), 0.6),
    _Choice(MatmulConfig(64, 64, 64, 8, 4, 4), 0.4),
)
_AMPERE = (
    _Choice(MatmulConfig(128, 128, 32, 8, 8, 4), 1.0),
    _Choice(MatmulConfig(64, 128, 32, 8, 4, 4), 0.8),
    _Choice(MatmulConfig(64, 64, 32, 8, 4, 4), 0.5),
)
_CDNA = (
    _Choice(MatmulConfig(128, 128, 32, 8, 8, 2), 1.0),
    _Choice(MatmulConfig(64, 128, 32, 8, 4, 2), 0.7),
    _Choice(MatmulConfig(64, 64, 32, 8, 4, 2), 0.45),
)
# NVIDIA multiplies float32 without matrix units, one instruction per product: larger tiles take minutes to compile.
_FLOAT32 = (
    _Choice(MatmulConfig(64, 32, 16, 8, 8, 2), 1.0),
    _Choice(MatmulConfig(32, 32, 16, 8, 4, 2), 0.6),
)
# So small that even tests with few rows have several tiles per shard.
_INTERPRETED = (_Choice(MatmulConfig(16, 16, 16, 2, 4, 1), 1.0),)
# Multiply-adds that a processor of an H100 could do in the 3 us that a tile costs beside its products: to draw its
# number, wait for its flag, fill the pipeline, store. Estimated from the code for sm_90, not measured yet.
_TILE_OVERHEAD = 7_000_000
# Registers per processor, and the most per thread.
_REGISTERS, _MOST_REGISTERS = 65536, 248


def launch_options(config: MatmulConfig, item_bytes: int, target: Target) -> dict[str, int]:
    """Return triton's options for a fused matmul with these tiles.

    The limit is set to all registers that a thread can have. Without a limit ptxas gives these kernels 64, to allow
    more programs per processor than shared memory does, and spills.
    """
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if target.backend == "cuda":
        threads = 32 * config.num_warps * config.programs_per_processor(item_bytes, target)
        options["maxnreg"] = min(_REGISTERS // threads // 8 * 8, _MOST_REGISTERS)
    return options


def exchange_config(
    rows: int,
    columns: int,
    depth: int,
    world: int,
    dtype: torch.dtype,
    target: Target,
    *,
    num_terms: int = 1,
    reserved: int = 0,
    beside_copies: bool = False,
) -> MatmulConfig:
    """Return the tiles of a matmul of `rows` rows from each of `world` ranks, [rows, depth] @ [depth, columns].

    Args:
        num_terms: number of products that are added; several need smaller tiles, since each operand takes registers.
        reserved, beside_copies: what is left to other kernels (processors.py).
    """
    return _chosen(rows, columns, depth, world, dtype, target, num_terms, reserved, beside_copies)[0]


def busiest_multiply_adds(
    rows: int,
    columns: int,
    depth: int,
    world: int,
    dtype: torch.dtype,
    target: Target,
    *,
    reserved: int = 0,
    beside_copies: bool = False,
) -> float:
    """Return the multiply-adds that the busiest processor could do in the time of its tiles; as `exchange_config`."""
    return _chosen(rows, columns, depth, world, dtype, target, 1, reserved, beside_copies)[1]


def estimated(
    config: MatmulConfig,
    speed: float,
    num_tiles: int,
    depth: int,
    num_processors: int,
    programs_per_processor: int,
) -> float:
    """Return the multiply-adds that the busiest of the processors could do in the time of its tiles.

        n * t + overhead + (ceil(n / programs_per_processor) - 1) * max(overhead - (programs_per_processor - 1) * t, 0)

    with n = ceil(num_tiles / num_processors), tiles of the busiest processor, t = block_m * block_n * depth / speed.
    Its programs share its matrix units. While one of them draws, waits and stores, the others multiply: what they have
    to multiply hides its overhead, but for that of the last tile.
    """
    most = cdiv(num_tiles, num_processors)
    tile = config.block_m * config.block_n * depth / speed
    hidden = (programs_per_processor - 1) * tile
    rounds = cdiv(most, programs_per_processor)
    return most * tile + _TILE_OVERHEAD + max(rounds - 1, 0) * max(_TILE_OVERHEAD - hidden, 0)


def num_tiles(config: MatmulConfig, rows: int, columns: int, world: int) -> int:
    """Return the number of tiles of `rows` rows from each of `world` ranks by `columns` columns."""
    return world * cdiv(rows, config.block_m) * cdiv(columns, config.block_n)


def _chosen(
    rows: int,
    columns: int,
    depth: int,
    world: int,
    dtype: torch.dtype,
    target: Target,
    num_terms: int,
    reserved: int,
    beside_copies: bool,
) -> tuple[MatmulConfig, float]:
    choices = _choices(dtype, target)
    # A few tokens more or less must not cause another compilation.
    about = nearest_power_of_2(rows)
    # Tiles of which less than half is empty.
    filled = [
        choice
        for choice in (choices[1:] if num_terms > 1 else choices)
        if 2 * about > choice.config.block_m and 2 * columns > choice.config.block_n
    ]
    processors = max(processors_of(target) - left_free(reserved, beside_copies=beside_copies), 1)

    def busiest(choice: _Choice, rows: int) -> float:
        config = choice.config
        together = programs_together(reserved, config.programs_per_processor(dtype.itemsize, target))
        tiles = num_tiles(config, rows, columns, world)
        return estimated(config, choice.speed, tiles, depth, processors, together)

    best = min(filled or choices[-1:], key=lambda choice: busiest(choice, about))
    return best.config, busiest(best, rows)


def _choices(dtype: torch.dtype, target: Target) -> tuple[_Choice, ...]:
    if INTERPRETED:
        return _INTERPRETED
    if dtype == torch.float32:
        return _FLOAT32
    if target.backend == "hip":
        return _CDNA
    # sm_90, sm_100 and sm_103 (B300), as in matmul/configs.py; sm_120 has as little shared memory as Ampere.
    return _HOPPER if 90 <= int(target.arch) < 120 else _AMPERE
