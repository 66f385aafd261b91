"""Rung: pure. Grids and lists as a person reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tpengine.plan import Kind, Plan, clock, describe, format_actions, grid, make_schedule, parse_actions


def test_grid_of_1f1b() -> None:
    assert grid(clock(make_schedule("1f1b", 3, 3).compute)).splitlines() == [
        "rank 0  F0 F1 F2 .  .  .  .  B0--- .  B1--- .  B2---",
        "rank 1  .  F0 F1 .  .  B0--- F2 B1--- .  B2--- .  .",
        "rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- .  .  .  .",
    ]


def test_grid_columns_align() -> None:
    lines = grid(clock(make_schedule("gpipe", 2, 11).compute)).splitlines()
    # Labels up to F10, so a column has four characters; rank 1 starts one column later.
    assert lines[0].startswith("rank 0  F0  F1 ") and lines[1].startswith("rank 1  .   F0  F1 ")
    assert lines[0].index("B0-----") == lines[1].index("B0-----") + 2 * 4
    assert len(lines[0]) - len("rank 0  ") == 36 * 4 - 1


def test_grid_names_chunks_where_a_rank_has_several() -> None:
    lists = [parse_actions("0F0 2F0 2B0 0B0"), parse_actions("1F0 3F0 3B0 1B0")]
    # A chunk of two on a rank takes half as long.
    assert grid(clock(lists), unit=0.5).splitlines()[0] == ("rank 0  0F0 .   2F0 .   .   .   2B0---- .   .   0B0----")


def test_grid_rounds_to_the_unit() -> None:
    timeline = clock(make_schedule("gpipe", 1, 2).compute, {(Kind.F, 0): 0.11, (Kind.B, 0): 0.19})
    assert grid(timeline, unit=0.1) == "rank 0  F0 F1 B0--- B1---"
    with pytest.raises(ValueError, match="above 0: got unit 0"):
        grid(timeline, unit=0.0)


def test_describe_breaks_between_actions(build_plan: Callable[..., Plan]) -> None:
    plan = build_plan("1f1b", 2, 3)
    lines = describe(plan, width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0].startswith("rank 0  0F0 0SEND_F0")
    listed = " ".join(line.removeprefix("rank 0").removeprefix("rank 1").strip() for line in lines)
    assert listed == " ".join(map(format_actions, plan.actions))
