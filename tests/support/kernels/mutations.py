"""The engine broken on purpose: which mutations a comparison does not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from support.ranks.rank_pool import RankError

Outcome = TypeVar("Outcome")


def survivors(
    mutations: Iterable[str], outcome_of: Callable[[str], Outcome], compare: Callable[[Outcome], None]
) -> list[str]:
    """Run every mutation and compare what comes of it.

    Args:
        mutations: by name.
        outcome_of: runs the broken program.
        compare: raises AssertionError where the outcome is wrong.

    Returns:
        Those that went unnoticed.

    Raises:
        RankError: a mutation crashed its ranks, which is no verdict.
    """
    unnoticed = []
    for mutation in mutations:
        try:
            compare(outcome_of(mutation))
        except RankError:
            raise
        except AssertionError:
            continue
        unnoticed.append(mutation)
    return unnoticed
