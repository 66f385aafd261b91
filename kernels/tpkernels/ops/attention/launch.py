"""How attention's kernels are launched: what they depend on, how they read, in which blocks, and who rotates.

Problem: what attention depends on besides q, k and v, in the form of schemas, and in that of kernel arguments.

Operands: q, k, v and dy are read by descriptors of TMA boxes where they can be, else by pointers. A descriptor is of
[B, heads, rows, E], with the tensor's strides, and a box has rows of one head. What is beyond the rows or the columns
reads as 0, as it must: so packed documents, which end within a tensor, are read by pointers.

Rotation: the kernels take q and k rotated, by rope's kernel, positions by documents.

Blocks, warps and stages are chosen for each target, width of heads and bytes per number.

They were found by compiling: of candidates from large to small, the first that spills nothing and fits into shared
memory, with a window and packed documents. Dropout in float32, or with heads of 256, may spill some bytes; it is not
among the checked launches. No GPU has timed the configurations yet: `candidates` lists what is worth timing. A tile has
64, 128 or 256 columns, a number 2 or 4 bytes. Dropout draws its mask in the same loop and needs registers for it.

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
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpkernels.launch import Target, cdiv, power_of_2, signed, tl
from tpkernels.ops.rope import launch_rope

# Sizes and numbers that change from call to call; they must not cause recompilation.
NOT_SPECIALIZED = [
    "num_documents",
    "query_length",
    "key_length",
    "num_queries",
    "window",
    "scale",
    "groups_per_row",
    "first_row_head",
    "num_row_heads",
    "seed",
    "counter2",
    "counter3",
]


class Options(NamedTuple):
    """What attention depends on besides its tensors.

    Attributes:
        causal: if True, a query does not see later keys.
        window: how many keys back a query sees, its own included; 0 for all.
        scale: of the scores.
        interleaved: how rotary embedding pairs columns.
        rate: of dropped probabilities.
        dropout: key0, key1, counter2, counter3 of the stream; first head given, heads of the layer. Empty if none.
    """

    causal: bool
    window: int
    scale: float
    interleaved: bool
    rate: float
    dropout: tuple[int, ...]

    @property
    def packed(self) -> tuple[list[int], list[float]]:
        """Return them as two arguments: torch's time per call grows with the square of a schema's arguments."""
        return [int(self.causal), self.window, int(self.interleaved), *self.dropout], [self.scale, self.rate]

    @classmethod
    def unpacked(cls, integers: Sequence[int], reals: Sequence[float]) -> Options:
        """Return what was packed."""
        causal, window, interleaved, *dropout = integers
        scale, rate = reals
        return cls(bool(causal), window, scale, bool(interleaved), rate, tuple(dropout))


class Sides(NamedTuple):
    """Where documents begin among queries and keys, int32 or int64 [documents + 1]; None if nothing is packed."""

    query_starts: Tensor | None
    key_starts: Tensor | None


class Tables(NamedTuple):
    """cos and sin [positions, E/2], float32; None if nothing is rotated."""

    cos: Tensor | None
    sin: Tensor | None


def num_blocks(length: int, starts: Tensor | None, block: int) -> int:
    """Return the number of programs along a side: see tiles.document_of."""
    return cdiv(length, block) if starts is None else length // block + starts.shape[0] - 1


def sizes(q: Tensor, k: Tensor, sides: Sides) -> tuple[int, ...]:
    """Return num_documents, query_length, key_length, num_queries, num_heads."""
    num_documents = 0 if sides.query_starts is None else sides.query_starts.shape[0] - 1
    return num_documents, q.shape[1], k.shape[1], q.shape[1], q.shape[2]


def dropout_numbers(k: Tensor, options: Options) -> tuple[int, ...]:
    """Return groups_per_row, first_row_head, num_row_heads, seed, counter2, counter3."""
    key0, key1, counter2, counter3, first_head, num_heads = options.dropout or (0,) * 6
    seed, words = key1 << 32 | key0, (counter2, counter3)
    return (
        cdiv(k.shape[1], 4),
        first_head,
        num_heads,
        signed(seed, 64),
        *(signed(word, 32) for word in words),
    )


def block_head(t: Tensor) -> int:
    """Return the columns of a tile of heads [..., E]: a power of two, and 16 for a product at least."""
    return max(16, power_of_2(t.shape[-1]))


def constants(q: Tensor, k: Tensor, options: Options) -> dict[str, Any]:
    """Return the constants that all kernels of attention are compiled with."""
    head = q.shape[3]
    return {
        "NUM_HEADS_PER_GROUP": q.shape[2] // k.shape[2],
        "HEAD": head,
        "BLOCK_HEAD": block_head(q),
        "CAUSAL": options.causal,
        "WINDOWED": options.window > 0,
        "THRESHOLD": round(options.rate * 2**32),
        "KEEP_SCALE": 1 / (1 - options.rate),
    }


def are_described(target: Target, sides: Sides, *tensors: Tensor) -> bool:
    """Return whether TMA can read tensors [B, S, heads, E]: all of them, so that a kernel has two variants, not 16."""
    if tl is None or target.backend != "cuda" or int(target.arch) < 90 or sides.query_starts is not None:
        return False
    return all(map(_is_readable, tensors))


def _is_readable(t: Tensor) -> bool:
    """Return whether 16-bit rows begin at multiples of 16 bytes, and none twice, as those of an expanded tensor do."""
    begins = [t.data_ptr(), *(stride * t.element_size() for _, stride in _gaps(t))]
    return (
        t.element_size() == 2
        and t.numel() > 0
        and all(begin % 16 == 0 for begin in begins)
        and all(0 < stride * t.element_size() < 1 << 40 for _, stride in _gaps(t))
        and max(t.shape) < 1 << 31
    )


def _gaps(t: Tensor) -> list[tuple[int, int]]:
    """Return (size, stride) of the dims before the last that have more than one place."""
    return [(size, stride) for size, stride in zip(t.shape[:3], t.stride()[:3], strict=True) if size > 1]


def operand(t: Tensor, block_rows: int, block_columns: int, is_described: bool) -> Any:
    """Return the kernel argument for reading t[B, S, heads, E] by blocks of rows of a head."""
    if not is_described:
        return t
    from triton.tools.tensor_descriptor import TensorDescriptor

    heads_first = t.transpose(1, 2)
    # The stride of a dim with one place may be anything, but a descriptor's must be a multiple of 16 bytes.
    strides = [stride if size > 1 else 8 for size, stride in zip(heads_first.shape, heads_first.stride(), strict=True)]
    return TensorDescriptor(t, list(heads_first.shape), [*strides[:3], 1], [1, 1, block_rows, block_columns])


class Rotation:
    """Rotates heads of queries or keys, which have the same places, to those places and back.

    Args:
        like: queries or keys [B, S, heads, E].
        tables, sides, options: as of attention; there are tables.
    """

    def __init__(self, like: Tensor, tables: Tables, sides: Sides, options: Options) -> None:
        assert tables.cos is not None and tables.sin is not None, "only what has tables is rotated"
        self._interleaved = options.interleaved
        self._positions = _positions(like, sides.query_starts)
        # Without positions rope takes sequences of as many tokens as the tables have rows.
        num_rows = like.shape[1] if self._positions is None else len(tables.cos)
        self._cos, self._sin = tables.cos[:num_rows], tables.sin[:num_rows]

    def forth(self, x: Tensor) -> Tensor:
        """Return x[B, S, heads, E] rotated to its places, contiguous."""
        return self._rotated(x, False, None).view(x.shape)

    def back(self, x: Tensor, out: Tensor) -> None:
        """Write x[B, S, heads, E], rotated back, into `out`: of x's shape, in which sequences follow each other."""
        self._rotated(x, True, out.view(_tokens(out)))

    def _rotated(self, x: Tensor, inverse: bool, out: Tensor | None) -> Tensor:
        tokens = x.reshape(_tokens(x))
        return launch_rope(tokens, self._cos, self._sin, self._positions, self._interleaved, inverse, out)


def _tokens(x: Tensor) -> tuple[int, ...]:
    return (x.shape[0] * x.shape[1], *x.shape[2:])


def _positions(like: Tensor, starts: Tensor | None) -> Tensor | None:
    """Return the place of each token of one sequence in its document, [S]; None without documents."""
    if starts is None:
        return None
    token = torch.arange(like.shape[1], dtype=starts.dtype, device=like.device)
    return token - starts[torch.searchsorted(starts, token, right=True) - 1]


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
