"""Rung: pure. Grids and lists as a person reads them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.plan import (
    Kind,
    Plan,
    RankTimeline,
    Span,
    Timeline,
    clock,
    format_actions,
    make_schedule,
    parse_action,
    parse_actions,
)
from tpengine.planner.draw import describe, grid


def at(name: str, start: float, end: float) -> Span:
    return Span(parse_action(name), start, end)


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


def test_an_action_from_a_half_to_a_half_has_its_columns() -> None:
    # Python's round() takes both 1.5 and 2.5 to 2.
    timeline = Timeline((RankTimeline(compute=(at("0F0", 0.5, 1.5), at("0F1", 1.5, 2.5), at("0B0", 2.5, 4.5))),))
    assert grid(timeline) == "rank 0  .  F0 F1 B0---"


def test_a_short_action_has_a_column_that_idle_time_makes_up_for() -> None:
    timeline = Timeline((RankTimeline(compute=(at("0F0", 0, 0.1), at("0F1", 0.1, 0.2), at("0B0", 4, 6))),))
    assert grid(timeline) == "rank 0  F0 F1 .  .  B0---"


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=12), min_size=1, max_size=4
    ),
    st.sampled_from([1.0, 0.1, 1 / 3, 0.25]),
    st.sampled_from([1.0, 1.0, 7.0]),
)
@settings(max_examples=200, deadline=None)
def test_a_grid_has_every_action_in_order_at_its_time(
    steps: list[list[tuple[int, int]]], tick: float, coarser: float
) -> None:
    """Rows of random pauses and actions, in ticks; a column of the shortest action, or of several of it."""
    rows = []
    for row in steps:
        time, spans = 0.0, []
        for number, (pause, length) in enumerate(row):
            spans.append(at(f"0F{number}", time + pause * tick, time + (pause + length) * tick))
            time = spans[-1].end
        rows.append(spans)
    timeline = Timeline(tuple(RankTimeline(compute=tuple(spans)) for spans in rows))
    unit = coarser * min(span.duration for spans in rows for span in spans)
    lines = grid(timeline, unit).splitlines()
    width = 1 + len(f"F{max(map(len, rows)) - 1}")
    for line, spans in zip(lines, rows, strict=True):
        found = list(re.finditer(r"F([0-9]+)", line))
        assert [int(match[1]) for match in found] == list(range(len(spans)))
        places = [divmod(match.start() - len("rank 0  "), width) for match in found]
        assert all(rest == 0 for _, rest in places)
        if coarser == 1.0:
            for (column, _), span in zip(places, spans, strict=True):
                assert abs(column - span.start / unit) < 0.5 + 1e-5
        assert len(line) <= len("rank 0  ") + width * (timeline.makespan / unit + max(map(len, rows)) + 1)


def test_describe_breaks_between_actions(build_plan: Callable[..., Plan]) -> None:
    plan = build_plan("1f1b", 2, 3)
    lines = describe(plan, width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0].startswith("rank 0  0F0 0SEND_F0")
    listed = " ".join(line.removeprefix("rank 0").removeprefix("rank 1").strip() for line in lines)
    assert listed == " ".join(map(format_actions, plan.actions))
