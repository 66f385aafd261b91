"""Tiles of the fused matmuls, as functions of sizes that every rank knows, dtype and target. Not tuned on a GPU yet.

They differ from the plain matmul's (matmul/configs.py). A tile's rows all belong to one rank, so few rows per rank need
low tiles. And every rank must take the same tiles, because a flag stands for whole tiles.
"""

from __future__ import annotations

import torch

from tpkernels.launch import INTERPRETED, Target, cdiv
from tpkernels.ops.matmul.configs import MatmulConfig

# For each target from large to small; the first is taken whose tiles are at most half empty and occupy half the GPU.
_HOPPER = (
    MatmulConfig(128, 256, 64, 4, 8, 3),
    MatmulConfig(128, 128, 64, 8, 8, 4),
    MatmulConfig(64, 128, 64, 8, 4, 4),
    MatmulConfig(64, 64, 64, 8, 4, 4),
)
_AMPERE = (
    MatmulConfig(128, 128, 32, 8, 8, 4),
    MatmulConfig(64, 128, 32, 8, 4, 4),
    MatmulConfig(64, 64, 32, 8, 4, 4),
)
_CDNA = (
    MatmulConfig(128, 128, 32, 8, 8, 2),
    MatmulConfig(64, 128, 32, 8, 4, 2),
    MatmulConfig(64, 64, 32, 8, 4, 2),
)
# NVIDIA multiplies float32 without matrix units, one instruction per product: larger tiles take minutes to compile.
_FLOAT32 = (MatmulConfig(64, 32, 16, 8, 8, 2), MatmulConfig(32, 32, 16, 8, 4, 2))
# So small that even tests with few rows have several tiles per shard.
_INTERPRETED = (MatmulConfig(16, 16, 16, 2, 4, 1),)
_FEWEST_TILES = 64
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
    rows: int, columns: int, world: int, dtype: torch.dtype, target: Target, *, num_terms: int = 1
) -> MatmulConfig:
    """Return the tiles of a matmul of `rows` rows from each of `world` ranks by `columns` columns.

    Args:
        num_terms: number of products that are added; several need smaller tiles, since each operand takes registers.
    """
    if INTERPRETED:
        return _INTERPRETED[0]
    choices: tuple[MatmulConfig, ...]
    if dtype == torch.float32:
        choices = _FLOAT32
    elif target.backend == "hip":
        choices = _CDNA
    else:
        # sm_90, sm_100 and sm_103 (B300), as in matmul/configs.py; sm_120 has as little shared memory as Ampere.
        choices = _HOPPER if 90 <= int(target.arch) < 120 else _AMPERE
    for config in choices[1:] if num_terms > 1 else choices:
        tiles = world * cdiv(rows, config.block_m) * cdiv(columns, config.block_n)
        if 2 * rows > config.block_m and 2 * columns > config.block_n and tiles >= _FEWEST_TILES:
            return config
    return choices[-1]
