"""Rung: pure. A name that by_default gives and no member has is refused: the grid would be slow as a whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from support import ROOT


@pytest.mark.parametrize(("names", "refused"), [(("2", "3"), ""), (("2", "two"), r"got test_x\.py::test_grid\[two\]$")])
def test_a_name_that_no_member_has_is_refused(
    pytestconfig: pytest.Config, names: tuple[str, ...], refused: str
) -> None:
    conftest: Any = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    mark = pytest.mark.by_default(*names).mark
    # A grid of three members.
    items = [
        SimpleNamespace(name=name, nodeid=f"test_x.py::{name}", get_closest_marker=lambda _: mark)
        for name in (f"test_grid[{size}]" for size in (1, 2, 3))
    ]
    if not refused:
        conftest._check_defaults(items)
        return
    with pytest.raises(pytest.UsageError, match=refused):
        conftest._check_defaults(items)
