"""Rung: pure. Which steps a run records by itself. That it does is in training/run/test_loop.py."""

from __future__ import annotations

import pytest

from tpengine.runs.profiler import steps_after_warm_up


@pytest.mark.parametrize(
    ("begin", "end", "num_events", "wanted"),
    [
        (0, 250, 100, range(4, 12)),
        (100, 250, 100, range(104, 112)),  # a run that goes on
        (0, 8, 100, range(2, 8)),
        (0, 2, 100, range(1, 2)),
        (0, 1, 100, range(1, 1)),  # a first step alone says nothing of steps
        (7, 7, 100, range(8, 8)),  # all is done
        (0, 250, 60_000, range(4, 7)),  # many ranks: fewer steps
        (0, 250, 300_000, range(4, 4)),
    ],
)
def test_a_few_steps_after_the_warm_up(begin: int, end: int, num_events: int, wanted: range) -> None:
    assert steps_after_warm_up(begin, end, num_events) == wanted
