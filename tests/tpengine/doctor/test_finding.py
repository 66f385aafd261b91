"""Rung: pure. The table, and how it ends: "ready", or what to change with its commands."""

from __future__ import annotations

import pytest

from tpengine.doctor.finding import change, is_ready, ok, places, table, unseen, verdict_lines

FINDINGS = [
    ok("cores", "16 for 8 ranks", where="host 0"),
    unseen("NCCL", "ranks have no GPUs"),
    change("open files", "256 of 1024", remedy="ulimit -n 1024", where="host 1"),
]


def test_a_line_has_verdict_what_value_and_where() -> None:
    lines = table(FINDINGS)
    assert [line.split()[0] for line in lines] == ["ok", "unseen", "change"]
    assert lines[0].endswith("host 0") and "16 for 8 ranks" in lines[0]


def test_it_ends_with_what_to_change_and_the_command() -> None:
    assert verdict_lines(FINDINGS) == [
        "not looked at: NCCL",
        "not ready: 1 to change",
        "1. open files (host 1): 256 of 1024",
        "       ulimit -n 1024",
    ]
    assert not is_ready(FINDINGS)


def test_it_ends_with_ready_although_not_all_was_seen() -> None:
    assert verdict_lines(FINDINGS[:2]) == ["not looked at: NCCL", "ready"]
    assert verdict_lines(FINDINGS[:1]) == ["ready"]


def test_a_change_says_what_helps() -> None:
    with pytest.raises(AssertionError, match="say what helps"):
        change("cores", "1", remedy="")


@pytest.mark.parametrize(
    ("numbers", "words"),
    [([3], "rank 3"), ([0, 1], "ranks 0, 1"), ([2, 1, 0], "ranks 0 to 2"), ([0, 2, 5], "ranks 0, 2, 5")],
)
def test_numbers_in_words(numbers: list[int], words: str) -> None:
    assert places(numbers) == words
