"""Rung: pure. What a person reads of two contestants; numbers only where the check was green."""

from __future__ import annotations

import io

from rich.console import Console

from benchmarks.harness.tables import speed_table
from benchmarks.harness.timing import Comparison


def test_times_and_ratio_where_the_check_passed_and_its_reason_where_not() -> None:
    green = Comparison("passed", {"ours": [0.002] * 3, "theirs": [0.003, 0.003, 0.003]})
    red = Comparison("failed: they differ")
    rows = [comparison.fields("theirs") for comparison in (green, red)]
    file = io.StringIO()
    table = speed_table("title", {"case": ["a", "b"], "MB": ["1", "2"]}, rows, "ours", "theirs")
    Console(width=100, file=file).print(table)
    lines = [" ".join(line.split()) for line in file.getvalue().splitlines()]
    assert "case MB ours theirs theirs / ours p20 to p80" in lines
    assert "a 1 2.00 3.00 1.50 1.50 to 1.50" in lines
    assert "b 2 failed: they differ" in lines
