"""Rung: pure. The faults that are put into runs: every kind, share and number of ranks; the settings of a change."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from support.faults.cases import all_cases, settings_of
from tpengine.planner.diagnose.evidence import Fault as Verdict


def test_the_cases_are_those_that_must_be_shown() -> None:
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases)
    counted = Counter((case.verdict, case.num_ranks) for case in cases if case.forward_seconds)
    faults = (
        Verdict.SLOW_RANK,
        Verdict.SLOW_INPUT,
        Verdict.FEW_MICRO_BATCHES,
        Verdict.EXPOSED_DP,
        Verdict.MEMORY,
    )
    assert all(counted[fault, num_ranks] >= 3 for fault in faults for num_ranks in (2, 4))
    assert sum(number for (fault, _), number in counted.items() if fault is Verdict.NONE) == 10


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        ("--parallel.zero 1 (0.7 MB more)", {"zero": 1}),
        (
            "--parallel.recompute none --parallel.memory-limit 577 (1 MB more)",
            {"recompute": "none", "memory_limit": 577},
        ),
        ("--train.num-micro-batches 8, a batch 2 times as large, for each", {"num_micro_batches": 8}),
        ("a host and device there as fast as the others'", {}),
    ],
)
def test_settings_of_a_change(change: str, settings: dict[str, Any]) -> None:
    assert settings_of(change) == settings
