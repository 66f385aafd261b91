"""The order of samples: a keyed bijection instead of a stored shuffle.

It needs no memory, whatever the length of the text; it gives any place directly; and it has no state.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_NUM_ROUNDS = 6


def permute(
    places: NDArray[np.int64], num: int, seed: int, epoch: int, what: str = "sample order"
) -> NDArray[np.int64]:
    """Map places in [0, num) to places in [0, num), one to one, in an order keyed by (what, seed, epoch).

    A balanced Feistel network permutes the smallest power of four that holds num. A place that it maps outside is
    mapped again until it is inside (cycle walking), fewer than four times on average.

    Args: places: int64, any shape. num: at least 1. seed, epoch, what: key.
    Returns: int64, same shape.
    Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, sections 3 and 4; the round
        function is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
    """
    half_bits = max(1, ((num - 1).bit_length() + 1) // 2)
    digest = hashlib.blake2b(f"{what} {seed} {epoch}".encode(), digest_size=8 * _NUM_ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    result = _feistel(places.astype(np.uint64), keys, half_bits)
    while (outside := result >= num).any():
        result[outside] = _feistel(result[outside], keys, half_bits)
    return result.astype(np.int64)


def _feistel(value: NDArray[np.uint64], keys: NDArray[np.uint64], half_bits: int) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> shift, value & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return left << shift | right


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser; products wrap modulo 2**64."""
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return value ^ value >> np.uint64(31)
