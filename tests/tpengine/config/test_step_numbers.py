"""Rung: pure. Steps in files: how they are named, and which are none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tpengine.checkpoint.run.rollbacks import Rollback, rollback_of
from tpengine.config.step_numbers import first_of_rows, index_of, numbered
from tpengine.planner.profiles.ranks import StepSeconds, WrongProfile, parse_step


def test_a_step_is_named_by_the_number_that_is_finished_with_it() -> None:
    assert numbered(0)["step"] == 1 and [index_of(numbered(index)) for index in (0, 1, 99)] == [0, 1, 99]
    assert index_of({"step": 7}) == 7, "earlier versions counted from 0"


@pytest.mark.parametrize("value", [{}, [], "1", {"step": -1}, {"step": True}, {"step": 0, "counted_from": 1}])
def test_what_names_no_step_is_refused(value: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        index_of(value)


def test_rows_of_an_earlier_version_have_a_step_0() -> None:
    assert first_of_rows([{"step": 3}, {"step": 4}]) == 1 == first_of_rows([])
    assert first_of_rows([{"step": 0}, {"step": 1}]) == 0


@pytest.mark.parametrize("earlier", [False, True])
def test_rollbacks_and_profiles_are_read_as_they_were_written(earlier: bool) -> None:
    rollback, step = Rollback(14, 8, 1, ((32, 40),), 9.5, 3.0), StepSeconds(14, 2.0, 1.5)
    for known, parse in ((rollback, rollback_of), (step, parse_step)):
        content = json.loads(json.dumps(known.to_json()))
        assert content["step"] == 15
        if earlier:
            del content["counted_from"]
            content["step"] = 14
        assert parse(content) == known


def test_a_profile_names_steps_that_are_there() -> None:
    with pytest.raises(WrongProfile, match="counted from 2: got step 1"):
        parse_step({"step": 1, "counted_from": 2, "seconds": 2.0, "plan_seconds": 1.5})
