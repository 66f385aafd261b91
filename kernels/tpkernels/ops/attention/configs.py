"""Blocks, warps and stages of attention's kernels, for each target, width of heads and bytes per number.

Found by compiling: of candidates from large to small, the first that spills nothing and fits into shared memory, with a
window and packed documents. Dropout in float32, or with heads of 256, may spill some bytes; it is not among the checked
launches. No GPU has timed the configurations yet: `candidates` lists what is worth timing. A tile has 64, 128 or 256
columns, a number 2 or 4 bytes. Dropout draws its mask in the same loop and needs registers for it.

NVIDIA multiplies float32 without matrix units (launch.dot), in small blocks.

Backward makes 5 products where its blocks have at least 64 queries and 64 keys, and adds dq up in memory; else it makes
7, with dq in the registers of a kernel of its own. The adds overlap with the products. A tile of q queries, k keys and
E columns takes 10 q k E flops and adds 4 q E bytes to dq. At the rate of one of an H200's 132 processors (653 TFLOP/s
of all, work.py) a tile of 64 queries, 128 keys and 64 columns takes 1.06 us and adds 16 KB: all processors together add
2.0 TB/s, in the L2 cache, and two of seven products are saved. With 64 keys it is 4.1 TB/s, as fast as memory. Smaller
blocks, which is all that registers allow on the other targets and for wider heads, would add more than they save.
Computed, not measured. What five products cost besides: dq in float32 is zeroed, and read once to get its scale and
dtype, 10 bytes per number of dq.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from tpkernels.launch import Target


class Config(NamedTuple):
    """One kernel's launch: queries and keys per tile, triton's warps and stages."""

    block_queries: int
    block_keys: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """Return them as arguments of `launch.run`."""
        return {
            "BLOCK_QUERIES": self.block_queries,
            "BLOCK_KEYS": self.block_keys,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


# (columns, bytes per number, dropout): for sm_80, sm_90, sm_100, gfx942. 64 columns without entry use 128's.
_Table = dict[tuple[int, int, bool], tuple[Config, Config, Config, Config]]


FORWARD: _Table = {
    (64, 2, False): (Config(128, 64, 4, 3), Config(128, 64, 4, 3), Config(128, 64, 4, 3), Config(128, 64, 4, 3)),
    # A window and rotation spilled 8 bytes with 8 warps.
    (64, 4, False): (Config(32, 32, 4, 1), Config(32, 32, 4, 1), Config(32, 32, 8, 1), Config(32, 32, 4, 1)),
    (128, 2, False): (Config(128, 64, 8, 3), Config(128, 64, 8, 3), Config(128, 32, 8, 3), Config(128, 64, 8, 2)),
    (128, 2, True): (Config(64, 32, 4, 1), Config(128, 32, 8, 1), Config(128, 32, 8, 1), Config(128, 32, 8, 1)),
    (128, 4, False): (Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 4, 1)),
    (128, 4, True): (Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1)),
    (256, 2, False): (Config(64, 64, 8, 2), Config(64, 64, 8, 2), Config(64, 64, 8, 2), Config(32, 64, 4, 1)),
    (256, 2, True): (Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 16, 4, 1), Config(32, 16, 4, 1)),
}
QUERY_GRADIENT: _Table = {
    (64, 2, False): (Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(128, 64, 8, 2)),
    # Rotation spilled 8 bytes on sm_100 with 16 queries and 8 warps.
    (64, 4, False): (Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(32, 16, 4, 1), Config(16, 16, 8, 1)),
    (128, 2, False): (Config(64, 32, 8, 1), Config(128, 64, 8, 2), Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
    (128, 2, True): (Config(32, 32, 4, 1), Config(64, 32, 8, 1), Config(64, 64, 8, 1), Config(64, 32, 8, 1)),
    (128, 4, False): (Config(8, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1)),
    (128, 4, True): (Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1)),
    (256, 2, False): (Config(64, 64, 8, 1), Config(64, 32, 8, 2), Config(64, 64, 8, 1), Config(32, 32, 4, 1)),
    (256, 2, True): (Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 16, 8, 1)),
}
KEY_GRADIENT: _Table = {
    (64, 2, False): (Config(32, 128, 8, 2), Config(64, 128, 8, 2), Config(64, 128, 8, 2), Config(64, 64, 4, 2)),
    (64, 4, False): (Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 4, 1), Config(16, 16, 8, 1)),
    (128, 2, False): (Config(16, 64, 8, 1), Config(64, 64, 8, 2), Config(64, 128, 8, 2), Config(64, 64, 4, 1)),
    (128, 2, True): (Config(16, 32, 8, 1), Config(16, 32, 8, 1), Config(16, 64, 8, 1), Config(16, 64, 8, 1)),
    (128, 4, False): (Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1)),
    (128, 4, True): (Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1)),
    (256, 2, False): (Config(16, 64, 8, 1), Config(16, 64, 8, 1), Config(16, 32, 8, 1), Config(16, 64, 4, 1)),
    (256, 2, True): (Config(16, 32, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 32, 8, 1)),
}
# Of backward with five products. Without an entry it has seven.
FIVE_PRODUCTS: Mapping[tuple[int, int, bool], tuple[Config | None, ...]] = MappingProxyType(
    {
        (64, 2, False): (None, Config(64, 128, 8, 2), Config(64, 128, 8, 2), None),
        (128, 2, False): (None, None, Config(64, 64, 8, 1), None),
    }
)
# For sm_90 and sm_100.
_WORTH_TIMING: Mapping[tuple[str, int], tuple[Config, ...]] = MappingProxyType(
    {
        ("forward", 64): (Config(128, 64, 4, 3), Config(128, 64, 4, 2), Config(128, 128, 8, 2), Config(128, 64, 8, 3)),
        ("forward", 128): (Config(128, 64, 8, 3), Config(128, 64, 8, 2), Config(128, 128, 8, 2), Config(64, 64, 4, 3)),
        ("gradient", 64): (Config(64, 128, 8, 2), Config(64, 64, 4, 2), Config(64, 64, 8, 2)),
        # The blocks of 64 spill 24 to 288 bytes with a window or packed documents.
        ("gradient", 128): (Config(32, 64, 8, 2), Config(64, 64, 8, 2), Config(64, 64, 8, 1)),
    }
)


def config_of(table: _Table, width: int, item_bytes: int, drops: bool, target: Target) -> Config:
    """Return the entry for heads of `width` columns; a target in between uses the next lower one.

    GPUs with less shared memory than any NVIDIA target here use the small blocks that dropout needs.
    """
    if target.backend == "cuda" and target.shared_memory_bytes < Target("cuda", 80).shared_memory_bytes:
        drops = True
    of_targets = table.get((max(64, width), item_bytes, drops)) or table[128, item_bytes, drops]
    return of_targets[_place(target)]


def five_products_of(width: int, item_bytes: int, drops: bool, target: Target) -> Config | None:
    """Return the blocks with which backward makes five products; None where it makes seven."""
    if target.backend == "cuda" and target.shared_memory_bytes < Target("cuda", 90).shared_memory_bytes:
        return None
    of_targets = FIVE_PRODUCTS.get((max(64, width), item_bytes, drops))
    return None if of_targets is None else of_targets[_place(target)]


def takes_several_heads(width: int, item_bytes: int, drops: bool, target: Target) -> bool:
    """Return whether a program of dk and dv may loop over several query heads of a group with KEY_GRADIENT's blocks.

    On sm_90 that needs more registers than there are with the usual heads: it would spill, or take 16 queries per tile
    without loading ahead. There each head has a program of its own, which costs float32 copies of dk and dv per head.
    """
    return not ((max(64, width), item_bytes, drops) == (128, 2, False) and _place(target) == 1)


def candidates(kernel: str, width: int, target: Target) -> tuple[Config, ...]:
    """Return what is worth timing on a target for 16-bit heads of `width` columns: first what is taken, if it is.

    Args:
        kernel: "forward" or "gradient", the latter of backward with five products.
        width: as of `config_of`.
        target: of sm_90 and sm_100 there are several, of others one or none.
    """
    first = config_of(FORWARD, width, 2, False, target)
    taken = first if kernel == "forward" else five_products_of(width, 2, False, target)
    is_recent = target.backend == "cuda" and int(target.arch) in (90, 100)
    others = _WORTH_TIMING.get((kernel, max(64, width)), ()) if is_recent else ()
    return *([] if taken is None else [taken]), *(config for config in others if config != taken)


def _place(target: Target) -> int:
    if target.backend == "hip":
        return 3
    return bisect.bisect((90, 100), int(target.arch))
