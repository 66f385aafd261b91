"""A check over drawn cases that need files: each has a directory, which is empty when it begins."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

Draw = TypeVar("Draw")


def over_draws(
    draws: st.SearchStrategy[Draw], check: Callable[[Draw, Path], None], directory: Path, count: int
) -> None:
    """Check so many cases, the same ones every time.

    Args:
        draws: cases.
        check: (case, directory) -> None; raises if the case does not hold.
        directory: for one directory at a time.
        count: cases.
    """

    @settings(max_examples=count, deadline=None, database=None, derandomize=True)
    @given(drawn=draws)
    def over_all(drawn: Draw) -> None:
        place = directory / "now"
        place.mkdir()
        try:
            check(drawn, place)
        finally:
            shutil.rmtree(place)

    over_all()
