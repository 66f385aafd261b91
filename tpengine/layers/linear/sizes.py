"""What must be divisible by the number of ranks or shards."""

from __future__ import annotations


def check_tokens(num_tokens: int, num_ranks: int, kind: str = "tp") -> None:
    """Raise ValueError unless the number of tokens is divisible by the number of ranks."""
    if num_tokens % num_ranks:
        raise ValueError(
            f"the number of tokens must be divisible by {kind}: {num_tokens} tokens, {kind} {num_ranks}: "
            f"pad to {-(-num_tokens // num_ranks) * num_ranks}"
        )


def check_divides(what: str, size: int, shards: int) -> int:
    """Return size / shards; raise ValueError unless it is whole."""
    if size % shards:
        down, up = size // shards * shards, (size // shards + 1) * shards
        nearest = f"{down} or {up}" if down else str(up)
        raise ValueError(f"{what} {size} is not divisible by {shards} shards: use {nearest}")
    return size // shards
