"""Blocks, warps and stages of attention's kernels, for each target, width of heads and bytes per number.

Found by compiling: of candidates from large to small, the first that spills nothing and fits into shared memory with
rotation, a window and packed documents. Interleaved rotation, and dropout in float32 or with heads of 256, may spill
some bytes; they are not among the checked launches. No GPU has timed the configurations yet. A tile has 64, 128
or 256 columns, a number 2 or 4 bytes. Dropout draws its mask in the same loop and needs registers for it.

NVIDIA multiplies float32 without matrix units (launch.dot), in small blocks.

Why backward makes 7 products, not 5: one pass over key blocks would save two, but without atomics each key block then
hands on its part of dq, written and read once in float32. A causal head of S queries and E columns saves 2 S^2 E flops
and moves about 4 S^2 E / block_keys bytes. At the H200's rates in work.py (653 TFLOP/s, 4.08 TB/s) that wins from 320
keys per block; the largest that fits is 128. Computed, not measured, in microseconds per head:

    S, E          saved    parts, 64 keys    parts, 128 keys    memory for the parts, 64 keys
    4096, 64        3.3              16.7                8.5                            34 MB
    4096, 128       6.6              33.4               17.0                            68 MB
    8192, 64       13.2              66.3               33.4                           135 MB
    8192, 128      26.3             132.6               66.8                           271 MB

Adding to dq in the order of key blocks, each waiting for the one before, needs no such memory and moves as many bytes,
mostly in the L2 cache, whose rate for that nobody has measured here; it holds programs back as well. At half the rate
of products the limit is 160 keys, still above 128.
"""

from __future__ import annotations

import bisect
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
    (128, 2, False): (Config(64, 64, 4, 2), Config(128, 64, 8, 3), Config(128, 64, 8, 3), Config(128, 64, 8, 2)),
    (128, 2, True): (Config(64, 32, 4, 1), Config(128, 32, 8, 1), Config(128, 32, 8, 1), Config(128, 32, 8, 1)),
    (128, 4, False): (Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 4, 1)),
    (128, 4, True): (Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1)),
    (256, 2, False): (Config(64, 32, 8, 2), Config(64, 32, 8, 1), Config(64, 64, 8, 1), Config(64, 32, 8, 2)),
    (256, 2, True): (Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 16, 4, 1), Config(32, 16, 4, 1)),
}
QUERY_GRADIENT: _Table = {
    (64, 2, False): (Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(128, 64, 8, 2)),
    # Rotation spilled 8 bytes on sm_100 with 16 queries and 8 warps.
    (64, 4, False): (Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(32, 16, 4, 1), Config(16, 16, 8, 1)),
    (128, 2, False): (Config(64, 32, 8, 1), Config(128, 64, 8, 2), Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
    (128, 2, True): (Config(32, 32, 4, 1), Config(64, 32, 8, 1), Config(64, 64, 8, 1), Config(64, 32, 8, 1)),
    (128, 4, False): (Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1)),
    (128, 4, True): (Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1)),
    (256, 2, False): (Config(64, 64, 8, 1), Config(64, 32, 8, 2), Config(64, 64, 8, 1), Config(32, 32, 4, 1)),
    (256, 2, True): (Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 16, 8, 1)),
}
KEY_GRADIENT: _Table = {
    (64, 2, False): (Config(64, 128, 8, 2), Config(64, 128, 8, 2), Config(64, 128, 8, 2), Config(64, 64, 4, 2)),
    (128, 2, False): (Config(16, 64, 8, 1), Config(64, 64, 8, 2), Config(64, 128, 8, 2), Config(64, 64, 4, 1)),
    (128, 2, True): (Config(16, 32, 4, 1), Config(16, 32, 8, 1), Config(16, 64, 8, 1), Config(16, 64, 8, 1)),
    (128, 4, False): (Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1)),
    (128, 4, True): (Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1)),
    (256, 2, False): (Config(32, 64, 8, 1), Config(16, 32, 8, 1), Config(16, 32, 8, 1), Config(16, 64, 8, 1)),
    (256, 2, True): (Config(16, 32, 8, 1), Config(16, 16, 8, 1), Config(16, 16, 8, 1), Config(16, 32, 8, 1)),
}


def config_of(table: _Table, width: int, item_bytes: int, drops: bool, target: Target) -> dict[str, int]:
    """Return the entry for heads of `width` columns; a target in between uses the next lower one.

    GPUs with less shared memory than any NVIDIA target here use the small blocks that dropout needs.
    """
    if target.backend == "cuda" and target.shared_memory_bytes < Target("cuda", 80).shared_memory_bytes:
        drops = True
    of_targets = table.get((max(64, width), item_bytes, drops)) or table[128, item_bytes, drops]
    return of_targets[_place(target)].options


def takes_several_heads(width: int, item_bytes: int, drops: bool, target: Target) -> bool:
    """Return whether a program of dk and dv may loop over several query heads of a group with KEY_GRADIENT's blocks.

    On sm_90 that needs more registers than there are with the usual heads: it would spill, or take 16 queries per tile
    without loading ahead. There each head has a program of its own, which costs float32 copies of dk and dv per head.
    """
    return not ((max(64, width), item_bytes, drops) == (128, 2, False) and _place(target) == 1)


def _place(target: Target) -> int:
    if target.backend == "hip":
        return 3
    return bisect.bisect((90, 100), int(target.arch))
