"""Tiles of the fused matmuls, as functions of sizes that every rank knows, dtype and target. Not tuned on a GPU yet.

They differ from the plain matmul's (matmul/configs.py): rows of a tile never cross from one rank's to another's, so few
rows a rank want low tiles, and every rank must take the same, since flags stand for whole tiles.
"""

from __future__ import annotations

import torch

from tpkernels.launch import INTERPRETED, Target, cdiv
from tpkernels.ops.matmul.configs import MatmulConfig

# By target, from large to small; the first whose tiles are at most half empty and keep half the GPU busy.
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
# float32 is multiplied without matrix units, each product an instruction: larger tiles take minutes to compile.
_FLOAT32 = (MatmulConfig(64, 32, 16, 8, 8, 2), MatmulConfig(32, 32, 16, 8, 4, 2))
# Several tiles a shard also in small tests.
_INTERPRETED = (MatmulConfig(16, 16, 16, 2, 4, 1),)
_FEWEST_TILES = 64
# Of a processor, and of a thread.
_REGISTERS, _MOST_REGISTERS = 65536, 248


def launch_options(config: MatmulConfig, item_bytes: int, target: Target) -> dict[str, int]:
    """How triton is to launch a fused matmul of these tiles.

    All registers that a thread can have are named as the limit: left alone, ptxas gives these kernels 64 for the sake
    of more programs a processor, which shared memory does not let in, and spills.
    """
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if target.backend == "cuda":
        threads = 32 * config.num_warps * config.programs_per_processor(item_bytes, target)
        options["maxnreg"] = min(_REGISTERS // threads // 8 * 8, _MOST_REGISTERS)
    return options


def exchange_config(
    rows: int, columns: int, world: int, dtype: torch.dtype, target: Target, *, num_terms: int = 1
) -> MatmulConfig:
    """The tiles of a matmul of `rows` rows from each of `world` ranks by `columns` columns.

    Args:
        num_terms: products that are added up; for several, whose operands all take registers, smaller tiles.
    """
    if INTERPRETED:
        return _INTERPRETED[0]
    choices: tuple[MatmulConfig, ...]
    if dtype == torch.float32:
        choices = _FLOAT32
    elif target.backend == "hip":
        choices = _CDNA
    else:
        # sm_90, sm_100 and sm_103 (B300), as matmul/configs.py; sm_120 has an Ampere's shared memory.
        choices = _HOPPER if 90 <= int(target.arch) < 120 else _AMPERE
    for config in choices[1:] if num_terms > 1 else choices:
        tiles = world * cdiv(rows, config.block_m) * cdiv(columns, config.block_n)
        if 2 * rows > config.block_m and 2 * columns > config.block_n and tiles >= _FEWEST_TILES:
            return config
    return choices[-1]
