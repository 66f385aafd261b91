"""Rung: pure. Plans of slices: their gathers in time, memory, figures and pictures, and as ranks record them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from support.plans.records import recorded
from support.plans.sharded import sharded

from tpengine.observe.records import MeasuredStep, measured_timeline
from tpengine.plan import SCHEDULES, Action, Kind, Plan, Reduced, Residency, Span, Timeline, Weights
from tpengine.planner import Costs, StepFigures, simulate
from tpengine.planner.costs import unit_costs
from tpengine.planner.draw import Picture, draw_svg
from tpengine.planner.memory import memory_curve, slot_bytes
from tpengine.planner.profiles.record_costs import profile_of

SVG = "{http://www.w3.org/2000/svg}"


def costs_of(plan: Plan, gather: float, reduction: float) -> Costs:
    """A chunk's forward takes 1, its backward 2; its weights are 10 bytes, its gradient buffer 4."""
    buckets = [bucket.index for bucket in plan.buckets]
    return Costs(
        {(kind, chunk): unit for kind, unit in zip("FBIW", (1.0, 2.0, 1.0, 1.0), strict=True) for chunk in range(8)},
        reductions=dict.fromkeys(buckets, reduction),
        gathers=dict.fromkeys(buckets, gather),
        weights=dict.fromkeys(buckets, 10.0),
        contributions=dict.fromkeys(buckets, 4.0),
        resident=(100.0,) * plan.num_ranks,
    )


def texts(spans: tuple[Span, ...]) -> list[tuple[str, float, float]]:
    return [(str(span.action), span.start, span.end) for span in spans]


def test_a_gather_that_nothing_hides_by_hand() -> None:
    plan = sharded("1f1b", 1, 1, Residency.USE)
    timeline = simulate(plan, costs_of(plan, 0.5, 0.25))
    (rank,) = timeline.ranks
    assert texts(rank.gathers) == [("g0", 0.0, 0.5), ("g0", 1.5, 2.0)]
    assert texts(rank.compute)[:2] == [("0F0[f0]", 0.5, 1.5), ("0B0[r0 f0]", 2.0, 4.0)]
    assert texts(rank.waits) == [("w[g0]", 0.0, 0.5), ("w[g0]", 1.5, 2.0), ("w[r0]", 4.0, 4.25)]
    # Weights of 10 from 0 to 4, freed and gathered again at 1.5; a buffer of 4 from 2 to 4.25.
    assert rank.memory == ((0.0, 110.0), (2.0, 114.0), (4.0, 104.0), (4.25, 100.0))
    assert [str(span.action) for _, span in timeline.critical_path] == ["g0", "0F0[f0]", "g0", "0B0[r0 f0]", "r0"]
    (figures,) = StepFigures.of(plan, timeline).ranks
    assert (figures.computing, figures.exposed, figures.bubble, figures.idle) == (3.0, 1.25, 0.0, 0.0)


def test_a_gather_starts_with_the_action_that_hides_it() -> None:
    plan = sharded("interleaved", 1, 1, Residency.USE)
    (rank,) = simulate(plan, costs_of(plan, 0.5, 3.0)).ranks
    assert texts(rank.compute)[:4] == [
        ("0F0[g1 f0]", 0.5, 1.5),
        ("1F0[f1]", 1.5, 2.5),
        ("1B0[g0 r1 f1]", 3.0, 5.0),
        ("0B0[r0 f0]", 5.0, 7.0),
    ]
    assert texts(rank.gathers) == [("g0", 0.0, 0.5), ("g1", 0.5, 1.0), ("g1", 2.5, 3.0), ("g0", 3.0, 3.5)]
    # The second reduction waits for the first, and both are waited for at the end.
    assert texts(rank.reductions) == [("r1", 5.0, 8.0), ("r0", 8.0, 11.0)]
    # Both chunks from 0.5, one from 1.5, again both from 3 with a buffer each from 3 and 5; what is left are buffers.
    assert rank.memory == (
        (0.0, 110.0), (0.5, 120.0), (1.5, 110.0), (3.0, 124.0), (5.0, 118.0), (7.0, 108.0), (11.0, 100.0),
    )  # fmt: skip


def test_gathers_and_reductions_share_a_stream() -> None:
    """The second forward needs weights whose gather waits behind the first micro-batch's reduction."""
    plan = sharded("1f1b", 1, 2, Residency.USE)
    (rank,) = simulate(plan, costs_of(plan, 0.5, 3.0)).ranks
    assert texts(rank.reductions)[0] == ("r0", 4.0, 7.0)
    assert texts(rank.gathers)[2] == ("g0", 7.0, 7.5)
    assert texts(rank.compute)[2] == ("0F1[f0]", 7.5, 8.5)


def test_a_buffer_is_held_until_its_reduction_is_waited_for() -> None:
    plan = sharded("1f1b", 1, 2, Residency.STEP)
    costs = costs_of(plan, 0.0, 0.5)
    (rank,) = simulate(plan, costs).ranks
    # r0 from 3 to 3.5 and from 6 to 6.5: the first is waited for right before the second backward begins at 4.
    assert rank.memory == ((0.0, 110.0), (1.0, 114.0), (6.0, 104.0), (6.5, 100.0))
    # When a reduction ends changes nothing before that.
    assert memory_curve(plan, 0, replace(rank, reductions=()), costs) == rank.memory


def test_weights_that_are_whole_and_buffers_of_a_step_are_resident() -> None:
    plan = sharded("1f1b", 1, 1, Residency.STEP, Weights.UPDATED, Reduced.STEP)
    (rank,) = simulate(plan, costs_of(plan, 0.5, 0.25)).ranks
    assert rank.memory == ((0.0, 100.0),)
    assert texts(rank.gathers) == [("g0", 0.0, 0.5)]
    plan = sharded("1f1b", 1, 1, Residency.STEP)
    only = replace(unit_costs(plan), weights={0: 10.0, 9: 1.0})
    assert simulate(plan, only).ranks[0].peak_bytes == 10.0


@pytest.mark.parametrize("residency", Residency)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_leaves_what_it_found_and_its_parts_add_up(name: str, residency: Residency) -> None:
    plan = sharded(name, 3, 5, residency, num_buckets=2)
    buckets = range(len(plan.buckets))
    costs = replace(
        unit_costs(plan),
        latency=0.25,
        gathers=dict.fromkeys(buckets, 0.3),
        reductions=dict.fromkeys(buckets, 0.4),
        weights=dict.fromkeys(buckets, 10.0),
        contributions=dict.fromkeys(buckets, 4.0),
    )
    timeline = simulate(plan, costs)
    figures = StepFigures.of(plan, timeline)
    for number, rank in enumerate(timeline.ranks):
        floor = slot_bytes(plan, number)
        assert rank.memory[-1][1] == pytest.approx(floor) == min(held for _, held in rank.memory)
        # No gather or reduction begins before the one before has ended.
        stream = sorted((*rank.gathers, *rank.reductions), key=lambda span: span.start)
        assert all(after.start >= before.end - 1e-9 for before, after in pairwise(stream))
        part = figures.ranks[number]
        assert part.computing + part.exposed + part.bubble + part.idle == pytest.approx(timeline.makespan)
        assert part.exposed > 0.0


def test_ranks_record_a_plan_with_gathers() -> None:
    """Every gather and every reduction of a bucket, however often."""
    plan = sharded("zbv", 2, 3, Residency.USE)
    simulated = simulate(plan, costs_of(plan, 0.5, 0.25))
    measured = measured_timeline(plan, recorded(plan, simulated))
    assert measured.makespan == pytest.approx(simulated.makespan)
    for rank, (lanes, original) in enumerate(zip(measured.ranks, simulated.ranks, strict=True)):
        assert [span.end for span in lanes.compute] == pytest.approx([span.end for span in original.compute])
        for lane, was in ((lanes.gathers, original.gathers), (lanes.reductions, original.reductions)):
            assert len(was) > 1
            assert [span.end for span in lane] == pytest.approx([span.end for span in was])
        assert memory_curve(plan, rank, lanes, costs_of(plan, 0.5, 0.25))[-1][1] == 100.0 + slot_bytes(plan, rank)
    StepFigures.of(plan, measured)
    profile = profile_of(plan, [MeasuredStep(0, 1.0, (recorded(plan, simulated),))], {})
    assert all(bucket.seconds == pytest.approx(0.25) for bucket in profile.buckets.values())


def drawn(plan: Plan, timeline: Timeline) -> ElementTree.Element:
    return ElementTree.fromstring(draw_svg([Picture("slices", timeline, plan=plan)]))


@pytest.mark.parametrize(
    ("weights", "entry"), [(Weights.SLICED, "weights gathered, tick: freed"), (Weights.UPDATED, "weights gathered")]
)
def test_gathers_have_a_lane_and_frees_ticks_on_it(weights: Weights, entry: str) -> None:
    plan = sharded("zbv", 2, 2, Residency.USE, weights)
    timeline = simulate(plan, costs_of(plan, 0.5, 0.25))
    root = drawn(plan, timeline)
    words = [node.text for node in root.iter(f"{SVG}text")]
    assert words.count("gather") == words.count("reduce") == 2
    assert entry in words and "bucket reduced" in words
    styles = [box.get("class") for box in root.iter(f"{SVG}rect")]
    assert styles.count("g") == 1 + sum(len(rank.gathers) for rank in timeline.ranks)
    num_frees = sum(bool(span.action.frees) for rank in timeline.ranks for span in rank.compute)
    assert styles.count("freed") == num_frees == (0 if weights is Weights.UPDATED else 5 + 6)


def test_a_plan_without_gathers_has_no_lane_for_them() -> None:
    plan = sharded("zbv", 2, 2, Residency.USE, Weights.WHOLE)
    words = [node.text for node in drawn(plan, simulate(plan, costs_of(plan, 0.5, 0.25))).iter(f"{SVG}text")]
    assert "gather" not in words and "weights gathered" not in words
    assert Action(Kind.GATHER, index=0) not in {a for actions in plan.actions for a in actions}
