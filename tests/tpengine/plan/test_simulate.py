"""Rung: pure. Makespan, bubble and live activations against the known figures and formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tpengine.plan import SCHEDULES, Action, Kind, Plan, parse_actions, simulate


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "makespan", "bubble"),
    [(4, 8, 33.0, 0.273), (4, 16, 57.0, 0.158), (8, 16, 69.0, 0.304), (8, 32, 117.0, 0.179)],
)
def test_goldens(name: str, num_ranks: int, num_microbatches: int, makespan: float, bubble: float) -> None:
    timeline = simulate(SCHEDULES[name](num_ranks, num_microbatches))
    assert timeline.makespan == makespan
    assert round(timeline.bubble, 3) == bubble
    peak = [num_ranks - rank for rank in range(num_ranks)] if name == "1f1b" else [num_microbatches] * num_ranks
    assert timeline.peak_live_activations == tuple(peak)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_formulas(name: str) -> None:
    for p in range(1, 9):
        for m in range(1, 17):
            timeline = simulate(SCHEDULES[name](p, m))
            assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
            peak = tuple(min(p - rank, m) if name == "1f1b" else m for rank in range(p))
            assert timeline.peak_live_activations == peak


def test_a_plan_runs_like_its_compute_lists(build_plan: Callable[..., Plan]) -> None:
    planned = simulate(build_plan("1f1b", 4, 8))
    bare = simulate(SCHEDULES["1f1b"](4, 8))
    assert planned.makespan == bare.makespan
    assert [[(span.start, span.end) for span in spans] for spans in planned.ranks] == [
        [(span.start, span.end) for span in spans] for spans in bare.ranks
    ]


def test_split_backward_holds_until_both_halves_are_done() -> None:
    lists = [parse_actions("0F0 0F1 0I0 0I1 0W0 0W1"), parse_actions("1F0 1I0 1W0 1F1 1I1 1W1")]
    timeline = simulate(lists)
    assert [(str(span.action), span.start) for span in timeline.ranks[0]] == [
        ("0F0", 0.0), ("0F1", 1.0), ("0I0", 3.0), ("0I1", 6.0), ("0W0", 7.0), ("0W1", 8.0),
    ]  # fmt: skip
    assert timeline.peak_live_activations == (2.0, 1.0)


def test_two_chunks_of_a_rank_count_half() -> None:
    lists = [parse_actions("0F0 2F0 2B0 0B0"), parse_actions("1F0 3F0 3B0 1B0")]
    assert simulate(lists).peak_live_activations == (1.0, 1.0)
    assert simulate(lists).makespan == 12.0


def test_durations_are_the_callers() -> None:
    lists = SCHEDULES["gpipe"](2, 3)
    assert simulate(lists, {Kind.F: 0.5, Kind.B: 1.5}).makespan == 8.0
    with pytest.raises(ValueError, match="B has None"):
        simulate(lists, {Kind.F: 1.0})
    with pytest.raises(ValueError, match="F has 0"):
        simulate(lists, {Kind.F: 0.0, Kind.B: 1.0})


def test_nothing_takes_no_time() -> None:
    timeline = simulate([()])
    assert (timeline.makespan, timeline.bubble, timeline.peak_live_activations) == (0.0, 0.0, (0.0,))


def test_lists_that_cannot_finish() -> None:
    with pytest.raises(ValueError, match="rank 0 waits in 0B0 for 0F0"):
        simulate([[Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)]])
    with pytest.raises(ValueError, match="rank 0 waits in 0B0 for 1B0"):
        simulate([parse_actions("0F0 0B0"), parse_actions("1F0")])
