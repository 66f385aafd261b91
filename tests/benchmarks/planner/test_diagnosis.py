"""Rung: pure. Which visit comes next, what a row says, and the cases: every share, fault and number of ranks.

That faults are named in real runs is shown by tests/tpengine/planner/diagnose/test_real_runs.py.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner.diagnosis.cases import Case, all_cases, paced_config
from benchmarks.planner.diagnosis.command import next_side, settings_of
from benchmarks.planner.diagnosis.faults import Fault
from benchmarks.planner.diagnosis.table import row_of, verdict
from benchmarks.run import main
from tpengine.planner.diagnose import Fault as Verdict

CONFIG = paced_config(2, m=2)
READ = Case("reader", Verdict.SLOW_INPUT, 0.2, CONFIG, lambda step: Fault(read=step), lambda _: Fault())
FEW = Case("few", Verdict.FEW_MICRO_BATCHES, 0.2, CONFIG, lambda _: Fault())
WELL = Case("well", Verdict.NONE, 0.0, CONFIG, lambda _: Fault())


def visit(case: Case, side: str, *seconds: float, said: Verdict = Verdict.NONE, **more: Any) -> dict[str, Any]:
    found = {"verdict": said, "says": [f"{said}: "], "brings": 0.5, "floor": 0.05, "change": "--parallel.zero 1"}
    return {"case": case.name, "side": side, "seconds": list(seconds)} | (found if side == "with" else {}) | more


def test_sides_take_turns_and_disturbed_visits_are_made_again() -> None:
    quiet, disturbed = (2.0, 2.05, 2.1), (2.0, 2.6, 2.7)
    visits: list[dict[str, Any]] = []
    for side in ("without", "with", "without", "with"):
        assert next_side(READ, visits, 2) == side
        visits.append(visit(READ, side, *disturbed))
        assert next_side(READ, visits, 2) == side
        visits[-1] = visit(READ, side, *quiet)
    assert next_side(READ, visits, 2) == ""
    # A case that is always disturbed is given up; one whose verdict names the run without begins with it.
    assert next_side(READ, [visit(READ, "without", *disturbed)] * 6, 2) == ""
    assert next_side(FEW, [], 1) == "with" and next_side(FEW, [visit(FEW, "with", *quiet)], 1) == "without"
    # Where nothing can be changed there is no run without, as for a healthy one.
    unchanged = visit(FEW, "with", *quiet, change="")
    assert next_side(FEW, [unchanged], 2) == "with" and next_side(FEW, [unchanged] * 2, 2) == ""
    assert next_side(WELL, [visit(WELL, "with", *quiet)], 1) == ""


def test_a_row_compares_what_a_change_brings_with_what_it_brought() -> None:
    visits = [
        visit(READ, "without", 1.5, 1.6, 1.5),
        visit(READ, "with", 2.0, 2.1, 2.1, said=Verdict.SLOW_INPUT),
        visit(READ, "with", 2.0, 3.0, 3.0),
    ]
    row = row_of(READ, visits)
    assert row["is_right"] and row["num_visits"] == 1 and row["num_disturbed"] == 1
    assert (row["brought_seconds"], row["brings_seconds"], row["share_ratio"]) == (0.5, 0.5, 0.25)
    wrong = row_of(READ, [*visits, visit(READ, "with", 2.0, 2.1, 2.1, said=Verdict.HOST)])
    assert not wrong["is_right"]
    ill = row_of(WELL, [visit(WELL, "with", 2.0, 2.0, said=Verdict.HOST)])
    assert row_of(READ, visits[1:]) == {}
    said = " ".join(verdict([row, wrong, ill]))
    assert "healthy runs: 0 of 1" in said and "right in every visit of 1 of 2" in said and "in 2 of 2" in said


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


@pytest.mark.slow
def test_a_pattern_that_no_case_has_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"diagnose --dir {tmp_path} --cases nothing-like-it".split()) == 2
    heard = capsys.readouterr().err
    assert heard.count("\n") == 1 and "--cases must be in a case's name: got 'nothing-like-it'" in heard
