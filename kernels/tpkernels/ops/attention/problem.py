"""What attention depends on besides q, k and v: in the form of schemas, and in that of kernel arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tpkernels.launch import cdiv, power_of_2, signed

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
