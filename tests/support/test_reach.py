"""Rung: pure. What is counted as reached by imports; and that what training reaches only falls, and has no wing."""

from __future__ import annotations

import ast
import re

import pytest

from support import reach
from support.reach import imports_of, num_lines, rooms

# Lines of tpengine that a command and a run's loop may reach: those of today. Lower them when they fall.
MOST_LINES = {"tpengine.train": 49_800, "tpengine.runs.loop": 34_850}
# Rooms that the core does not import; train.py hands a run what it needs of them.
WINGS = ("planner", "modules", "data", "hugging_face", "generation", "commands", "examples")

SOURCE = """
from typing import TYPE_CHECKING
import a.b
from c import d
from . import sibling
if TYPE_CHECKING:
    import only_for_types
else:
    import otherwise
def function():
    if TYPE_CHECKING:
        from only import types
    from late import name
"""


def test_late_imports_count_and_those_for_type_checkers_do_not() -> None:
    found = set(imports_of(ast.parse(SOURCE)))
    assert found == {"typing", "typing.TYPE_CHECKING", "a.b", "c", "c.d", "otherwise", "late", "late.name"}


def test_packages_are_reached_with_their_modules_and_reach_goes_on() -> None:
    found = reach.reach("tpengine.plan.text")
    assert {"tpengine", "tpengine.plan", "tpengine.plan.actions", "tpengine.plan.verify"} <= found
    assert not any(name.startswith(("tpkernels", "tpengine.training")) for name in found)
    assert num_lines(found) >= num_lines({"tpengine.plan.text", "tpengine.plan"}) > 0


def test_no_module_of_ours_imports_relatively() -> None:
    """Such imports would not be counted."""
    for module in (module for modules in rooms().values() for module in modules):
        path = reach.path_of(module)
        assert path is not None, module
        assert not re.search(r"^\s*from \.", path.read_text(), re.MULTILINE), module


@pytest.mark.parametrize("module", MOST_LINES)
def test_what_training_reaches_only_falls(module: str) -> None:
    lines = num_lines(reach.reach(module))
    assert lines <= MOST_LINES[module], "python -m support.reach says who reaches what"


def test_a_run_reaches_no_wing() -> None:
    found = {name.split(".")[1] for name in reach.reach("tpengine.runs.loop") if name.startswith("tpengine.")}
    assert "training" in found and found.isdisjoint(WINGS)


def test_it_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["reach", "tpengine.train", "tpengine.plan"])
    reach.main()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("tpengine.train ") and second.startswith("tpengine.plan ")
