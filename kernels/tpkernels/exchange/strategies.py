"""Names of the ways to do a sharded matmul and its exchange; fused/strategy.py says what they are and chooses."""

from __future__ import annotations

from typing import Literal, get_args

Strategy = Literal["plain", "fused", "push"]
AUTO = "auto"


def checked(strategy: str) -> str:
    """The strategy that a user names, if there is such a one.

    Raises:
        ValueError: there is not.
    """
    if strategy not in (AUTO, *get_args(Strategy)):
        raise ValueError(f"strategy must be auto, plain, fused or push: got {strategy!r}: use auto")
    return strategy
