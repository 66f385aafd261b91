"""Rung: pure. The list of rollbacks, and what is left out by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpengine import journal
from tpengine.checkpoint.rollbacks import Rollback, joined, left_out, read_rollbacks
from tpengine.data import SamplePosition

FIRST = Rollback(9, 4, 0, ((36, 40),), 8.5, 3.25)
SECOND = Rollback(20, 12, 0, ((30, 36), (40, 42)), 1 / 3, 0.1)
OTHER = Rollback(30, 24, 2, ((8, 16),), 2.0, 1.0)


def test_a_list_comes_back_with_all_bits(tmp_path: Path) -> None:
    path = tmp_path / "rollbacks.jsonl"
    journal.write(path, [FIRST.to_json(), SECOND.to_json()])
    assert read_rollbacks(path) == [FIRST, SECOND]


def test_ranges_of_each_order_are_merged_as_a_position_takes_them() -> None:
    found = left_out([FIRST, SECOND, OTHER])
    assert found == {0: ((30, 42),), 2: ((8, 16),)}
    assert SamplePosition(0, 0, found[0]).samples(29, 2).tolist() == [29, 42]
    assert left_out([]) == {}


def test_two_lists_of_one_run_are_joined() -> None:
    assert joined([FIRST, SECOND], [FIRST, OTHER]) == (FIRST, SECOND, OTHER)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"step": 1}',
        '{"step": 1, "to": 0, "order": 0, "samples": [], "loss": 1, "grad_norm": 1}',
        '{"step": 1, "to": 0, "order": 0, "samples": [[3, 3]], "loss": 1, "grad_norm": 1}',
        '{"step": 1, "to": 0, "order": 0, "samples": [[-3, 3]], "loss": 1, "grad_norm": 1}',
        '{"step": 1, "to": 0.5, "order": 0, "samples": [[1, 3]], "loss": 1, "grad_norm": 1}',
        '{"step": 1, "to": 0, "order": 0, "samples": [[1, 3, 5]], "loss": 1, "grad_norm": 1}',
    ],
)
def test_a_line_that_says_no_rollback_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rollbacks.jsonl"
    journal.write(path, [FIRST.to_json()])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match="line 2: "):
        read_rollbacks(path)
