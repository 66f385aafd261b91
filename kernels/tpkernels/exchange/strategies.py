"""Names of the strategies for a sharded matmul and its exchange; fused/strategy.py explains and chooses them."""

from __future__ import annotations

from typing import Literal, get_args

Strategy = Literal["plain", "fused", "push"]
AUTO = "auto"


def checked(strategy: str) -> str:
    """Return the strategy that a user names.

    Raises:
        ValueError: there is no such strategy.
    """
    if strategy not in (AUTO, *get_args(Strategy)):
        raise ValueError(f"strategy must be auto, plain, fused or push: got {strategy!r}: use auto")
    return strategy
