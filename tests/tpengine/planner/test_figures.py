"""Rung: pure. Where a step's time goes: by hand, and that the parts add up for every schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.plan import (
    SCHEDULES,
    Bucket,
    Chunk,
    Kind,
    Plan,
    RankTimeline,
    Span,
    TensorSpec,
    Tie,
    Timeline,
    parse_action,
    parse_actions,
)
from tpengine.planner import Costs, simulate
from tpengine.planner.costs import unit_costs
from tpengine.planner.figures import StepFigures

# 100 bytes.
BOUNDARY = TensorSpec((25,), "float32")


def plan_of(*lists: str) -> Plan:
    last = len(lists) - 1
    chunks = tuple(
        Chunk(rank, (rank, rank + 1), BOUNDARY if rank else None, BOUNDARY if rank < last else None)
        for rank in range(len(lists))
    )
    buckets, ties = (Bucket(0, (0,)), Bucket(1, (0,))), (Tie(0, (0, last)),)
    return Plan("by hand", 2, last + 1, chunks, buckets, ties, tuple(map(parse_actions, lists)), True)


def costs_of(num_chunks: int, forward: float = 2.0, backward: float = 4.0) -> Costs:
    durations = {(Kind.F, chunk): forward for chunk in range(num_chunks)}
    return Costs(durations | {(Kind.B, chunk): backward for chunk in range(num_chunks)})


ONE_EACH_WAY = (
    "0F0 0SEND_F0 0RECV_B0 w[0RECV_B0] w[0SEND_F0] 0B0",
    "1RECV_F0 w[1RECV_F0] 1F0 1B0 1SEND_B0 w[1SEND_B0]",
)


def test_a_wait_is_exposed_while_its_transfer_is_under_way() -> None:
    """Rank 1 waits 2 for a forward and 1 for the link; rank 0 then 7 for the transfer there and the work, and 1."""
    plan = plan_of(*ONE_EACH_WAY)
    timeline = simulate(plan, replace(costs_of(2), latency=0.5, bytes_per_time=200.0))
    figures = StepFigures.of(plan, timeline)
    assert figures.makespan == 2.0 + 1.0 + 6.0 + 1.0 + 4.0
    first, second = figures.ranks
    assert (first.computing, first.exposed, first.bubble, first.idle) == (6.0, 1.0, 7.0, 0.0)
    # Its last wait is for its own send, which is under way all the time; then it is done, and the other is not.
    assert (second.computing, second.exposed, second.bubble, second.idle) == (6.0, 1.0 + 1.0, 2.0, 4.0)
    assert figures.waited == {(0, 1): 8.0, (1, 0): 4.0}
    assert figures.bubble == 1 - 12 / 28
    assert figures.exposed == 3 / 28
    assert figures.sentence() == "stage 0 waits 57 % of the step on stage 1"


def test_a_reduction_is_exposed_and_no_stage_is_waited_for() -> None:
    plan = plan_of("0F0 0B0[r1 r0] w[r1 r0] CLIP STEP")
    figures = StepFigures.of(plan, simulate(plan, replace(costs_of(1), reductions={0: 3.0, 1: 5.0}, step=2.0)))
    (rank,) = figures.ranks
    # r1 from 4 to 9, r0 from 9 to 12, B until 6.
    assert (rank.computing, rank.exposed, rank.bubble, rank.idle) == (8.0, 6.0, 0.0, 0.0)
    assert figures.waited == {}
    assert figures.sentence() == "no stage waits on another"


def test_a_meeting_is_waited_for_on_who_comes_last() -> None:
    plan = plan_of("0F0 t0 CLIP", "1F0 1F1 1B0 CLIP", "2F0 2F1 t0 CLIP")
    figures = StepFigures.of(plan, simulate(plan, costs_of(3)))
    # Rank 2 comes last to the tie (4 against 2), rank 1 to CLIP (8 against 4).
    assert figures.waited == {(0, 2): 2.0, (0, 1): 4.0, (2, 1): 4.0}
    assert [rank.bubble for rank in figures.ranks] == [6.0, 0.0, 4.0]
    assert figures.slowest == 1
    assert figures.sentence() == "stage 0 waits 50 % of the step on stage 1"


def test_of_several_awaited_the_last_decides() -> None:
    """The receive is there at 3 and the bucket at 6: the wait from 2 to 6 is for the bucket."""
    spans = {
        "w[0RECV_B0 r0]": Span(parse_action("w[0RECV_B0 r0]"), 2.0, 6.0),
        "0RECV_B0": Span(parse_action("0RECV_B0"), 2.5, 3.0),
        "r0": Span(parse_action("r0"), 1.0, 6.0),
    }
    plan = plan_of("w[0RECV_B0 r0]", "1F0")
    lanes = {"receives": (spans["0RECV_B0"],), "waits": (spans["w[0RECV_B0 r0]"],)}
    bucket = RankTimeline(**lanes, reductions=(spans["r0"],))
    figures = StepFigures.of(plan, Timeline((bucket, RankTimeline())))
    assert (figures.ranks[0].exposed, figures.ranks[0].bubble, figures.waited) == (4.0, 0.0, {})
    sooner = replace(bucket, reductions=(replace(spans["r0"], end=2.75),))
    figures = StepFigures.of(plan, Timeline((sooner, RankTimeline())))
    assert (figures.ranks[0].exposed, figures.ranks[0].bubble, figures.waited) == (0.5, 3.5, {(0, 1): 4.0})


def test_a_measured_wait_without_its_transfer_is_bubble() -> None:
    """A timeline of a run whose transfers leave no span; what nothing covers is idle."""
    wait = Span(parse_action("w[0RECV_B0]"), 1.0, 4.0)
    measured = Timeline((RankTimeline(compute=(Span(parse_action("0B0"), 5.0, 6.0),), waits=(wait,)), RankTimeline()))
    figures = StepFigures.of(plan_of(*ONE_EACH_WAY), measured)
    rank = figures.ranks[0]
    assert (rank.computing, rank.exposed, rank.bubble, rank.idle) == (1.0, 0.0, 3.0, 2.0)
    assert figures.sentence() == "stage 0 waits 50 % of the step on stage 1"


def test_an_empty_step() -> None:
    figures = StepFigures.of(plan_of(""), simulate(plan_of("")))
    assert (figures.makespan, figures.bubble, figures.exposed, figures.slowest) == (0.0, 0.0, 0.0, 0)
    assert figures.sentence() == "no stage waits on another"


def test_peak_bytes_are_the_timelines(build_plan: Callable[..., Plan]) -> None:
    plan = build_plan("1f1b", 3, 4)
    timeline = simulate(plan, replace(unit_costs(plan), resident=(10.0, 20.0, 30.0)))
    peaks = [figures.peak_bytes for figures in StepFigures.of(plan, timeline).ranks]
    assert peaks == [rank.peak_bytes for rank in timeline.ranks] and peaks[0] > 10.0


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 5),
    st.integers(1, 8),
    st.floats(0.0, 3.0),
    st.floats(0.0, 3.0),
    st.floats(0.0, 3.0),
)
def test_the_parts_add_up(
    build_plan: Callable[..., Plan], name: str, p: int, m: int, latency: float, transfer: float, reduction: float
) -> None:
    plan = build_plan(name, p, m)
    costs = replace(
        unit_costs(plan),
        latency=latency,
        bytes_per_time=128 * 64 * 4 / transfer if transfer else math.inf,
        reductions={bucket.index: reduction for bucket in plan.buckets},
        ties=0.25,
    )
    timeline = simulate(plan, costs)
    figures = StepFigures.of(plan, timeline)
    for lanes, rank in zip(timeline.ranks, figures.ranks, strict=True):
        parts = rank.computing, rank.exposed, rank.bubble, rank.idle
        assert min(parts) >= 0.0
        assert sum(parts) == pytest.approx(figures.makespan)
        assert rank.exposed + rank.bubble == pytest.approx(sum(wait.duration for wait in lanes.waits))
    waits = sum(rank.exposed + rank.bubble for rank in figures.ranks)
    assert sum(figures.waited.values()) <= waits * (1 + 1e-9)
    if not reduction:
        assert sum(figures.waited.values()) == pytest.approx(waits)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 8))
def test_free_links_expose_nothing(build_plan: Callable[..., Plan], name: str, p: int, m: int) -> None:
    plan = build_plan(name, p, m)
    figures = StepFigures.of(plan, simulate(plan))
    assert figures.exposed == 0.0
    assert figures.bubble == simulate(plan).bubble
