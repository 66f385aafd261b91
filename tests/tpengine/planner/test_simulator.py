"""Rung: pure. The simulator against formulas derived by hand, the clock, and properties of every schedule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.plan import (
    SCHEDULES,
    Action,
    Bucket,
    Chunk,
    Kind,
    Plan,
    Span,
    TensorSpec,
    Tie,
    Timeline,
    clock,
    lower,
    make_schedule,
    parse_actions,
)
from tpengine.plan.actions import COMPUTE, TRANSFERS
from tpengine.planner import Costs, simulate
from tpengine.planner.costs import ring_time, unit_costs

# A boundary tensor of 100 bytes, so that a bandwidth of 100 / t occupies a link for t.
BOUNDARY = TensorSpec((25,), "float32")

BuildPlan = Callable[..., Plan]


def plan_of(*lists: str, ranks: tuple[int, ...] = (), training: bool = True) -> Plan:
    """A plan of the given lists; by default a chunk a rank, and a tie of the first and the last chunk."""
    ranks = ranks or tuple(range(len(lists)))
    last = len(ranks) - 1
    chunks = tuple(
        Chunk(rank, (chunk, chunk + 1), BOUNDARY if chunk else None, BOUNDARY if chunk < last else None)
        for chunk, rank in enumerate(ranks)
    )
    actions = tuple(map(parse_actions, lists))
    buckets = (Bucket(0, (0,)), Bucket(1, (0,)))
    return Plan("by hand", 8, last + 1, chunks, buckets, (Tie(0, (0, last)),), actions, training)


def costs_of(forward: float, backward: float, num_chunks: int = 2) -> Costs:
    durations = {(Kind.F, chunk): forward for chunk in range(num_chunks)}
    return Costs(durations | {(Kind.B, chunk): backward for chunk in range(num_chunks)})


def texts(spans: tuple[Span, ...]) -> list[tuple[str, float, float]]:
    return [(str(span.action), span.start, span.end) for span in spans]


def computed(timeline: Timeline) -> list[list[Span]]:
    return [[span for span in rank.compute if span.action.kind in COMPUTE] for rank in timeline.ranks]


def two_stages(first: str, second: str, num_microbatches: int) -> Plan:
    """Two stages that post all receives at once; the lists name `F0`, `B0`, ... of the own chunk."""
    lists = []
    for rank, names in enumerate((first, second)):
        receive, awaited, sent = ("RECV_B", "B", "F") if rank == 0 else ("RECV_F", "F", "B")
        words = [f"{rank}{receive}{microbatch}" for microbatch in range(num_microbatches)]
        sends = []
        for name in names.split():
            kind, microbatch = name[0], name[1:]
            if kind == awaited:
                words.append(f"w[{rank}{receive}{microbatch}]")
            words.append(f"{rank}{name}")
            if kind == sent:
                sends.append(f"{rank}SEND_{kind}{microbatch}")
                words.append(sends[-1])
        lists.append(" ".join([*words, f"w[{' '.join(sends)}]"]))
    return plan_of(*lists)


def gpipe_of_two(num_microbatches: int) -> Plan:
    names = " ".join(f"{kind}{microbatch}" for kind in "FB" for microbatch in range(num_microbatches))
    return two_stages(names, names, num_microbatches)


def one_f_one_b_of_two(num_microbatches: int) -> Plan:
    pairs = [f"F{k} B{k}" for k in range(num_microbatches)]
    shifted = [f"F{k + 1} B{k}" for k in range(num_microbatches - 1)]
    return two_stages(" ".join(["F0", *shifted, f"B{num_microbatches - 1}"]), " ".join(pairs), num_microbatches)


DURATIONS = [(1.0, 2.0, 0.25, 0.5), (1.5, 1.0, 0.5, 0.25), (3.0, 4.0, 0.0, 0.5), (2.0, 2.0, 1.0, 0.0)]


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 7])
@pytest.mark.parametrize(("f", "b", "occupied", "latency"), DURATIONS)
def test_gpipe_of_two_stages_pays_a_transfer_each_way(
    num_microbatches: int, f: float, b: float, occupied: float, latency: float
) -> None:
    """The first activation and the last gradient are exposed, all between them is behind compute."""
    costs = replace(costs_of(f, b), latency=latency, bytes_per_time=100 / occupied if occupied else math.inf)
    timeline = simulate(gpipe_of_two(num_microbatches), costs)
    assert timeline.makespan == (num_microbatches + 1) * (f + b) + 2 * (occupied + latency)


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 7])
@pytest.mark.parametrize(("f", "b", "occupied", "latency"), [(1.0, 2.0, 2.0, 0.0), (1.0, 2.0, 4.0, 8.0)])
def test_gpipe_of_two_stages_on_a_slow_link(
    num_microbatches: int, f: float, b: float, occupied: float, latency: float
) -> None:
    """The link carries one tensor after another; latency is paid once per direction, not once per tensor."""
    costs = replace(costs_of(f, b), latency=latency, bytes_per_time=100 / occupied)
    timeline = simulate(gpipe_of_two(num_microbatches), costs)
    assert timeline.makespan == 2 * (f + b) + 2 * num_microbatches * occupied + 2 * latency
    for rank in timeline.ranks:
        for lane in (rank.sends, rank.receives):
            starts = [span.start for span in lane]
            assert all(later - sooner >= occupied for sooner, later in itertools.pairwise(starts))
            assert {span.duration for span in lane} == {occupied + latency}
    # There and back, the tensors behind one another with their latencies overlapping.
    path = timeline.critical_path
    there = [span.start for _, span in path if span.action.kind is Kind.RECV_F or span.action.kind is Kind.SEND_F]
    assert there == [f + k * occupied for k in range(num_microbatches)]
    assert all(span.start <= before.end for (_, before), (_, span) in itertools.pairwise(path))


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize(("f", "b", "occupied", "latency"), DURATIONS)
def test_one_f_one_b_of_two_stages_pays_two_transfers_every_other_micro_batch(
    num_microbatches: int, f: float, b: float, occupied: float, latency: float
) -> None:
    """F of micro-batch 2k on the first rank follows B of 2k-2, so a transfer there and back is exposed each time."""
    costs = replace(costs_of(f, b), latency=latency, bytes_per_time=100 / occupied if occupied else math.inf)
    timeline = simulate(one_f_one_b_of_two(num_microbatches), costs)
    exposed = 2 * math.ceil(num_microbatches / 2) * (occupied + latency)
    assert timeline.makespan == (num_microbatches + 1) * (f + b) + exposed


def test_a_transfer_begins_when_both_sides_have_posted_it() -> None:
    lists = "0F0 0SEND_F0 w[0SEND_F0]", "1F7 1RECV_F0 w[1RECV_F0] 1F0"
    timeline = simulate(plan_of(*lists, training=False), replace(costs_of(2.0, 1.0), latency=0.5))
    first, second = timeline.ranks
    assert texts(first.sends) == [("0SEND_F0", 2.0, 2.5)]
    assert texts(first.waits) == [("w[0SEND_F0]", 2.0, 2.5)]
    assert texts(second.receives) == [("1RECV_F0", 2.0, 2.5)]
    assert texts(second.compute) == [("1F7", 0.0, 2.0), ("1F0", 2.5, 4.5)]
    late = simulate(plan_of(lists[0], "1F6 1F7 1RECV_F0 w[1RECV_F0] 1F0", training=False), costs_of(2.0, 1.0))
    assert texts(late.ranks[0].sends) == [("0SEND_F0", 4.0, 4.0)]


def test_the_two_directions_of_a_link_do_not_disturb_each_other() -> None:
    timeline = simulate(
        plan_of(
            "0F0 0SEND_F0 0RECV_B1 w[0SEND_F0 0RECV_B1]",
            "1F1 1RECV_F0 1SEND_B1 w[1RECV_F0 1SEND_B1]",
            training=False,
        ),
        replace(costs_of(1.0, 1.0), latency=1.0, bytes_per_time=50.0),
    )
    assert timeline.makespan == 1.0 + 2.0 + 1.0


def test_reductions_run_one_after_another_beside_compute() -> None:
    """r1 starts in the middle of B, r0 at its end behind r1."""
    costs = replace(costs_of(1.0, 2.0, 1), reductions={0: 1.0, 1: 3.0}, clip=0.5, step=0.25)
    (rank,) = simulate(plan_of("0F0 0B0[r1 r0] w[r1 r0] CLIP STEP"), costs).ranks
    assert texts(rank.reductions) == [("r1", 2.0, 5.0), ("r0", 5.0, 6.0)]
    assert texts(rank.waits) == [("w[r1 r0]", 3.0, 6.0)]
    assert texts(rank.compute)[2:] == [("CLIP", 6.0, 6.5), ("STEP", 6.5, 6.75)]


def test_a_core_that_also_makes_the_reductions_computes_longer() -> None:
    """Of r0 and r1 together a half is added to B, in whose middle r1 starts."""
    costs = replace(costs_of(1.0, 2.0, 1), reductions={0: 1.0, 1: 3.0}, reduce_share=0.5)
    (rank,) = simulate(plan_of("0F0 0B0[r1 r0] w[r1 r0]"), costs).ranks
    assert texts(rank.compute) == [("0F0", 0.0, 1.0), ("0B0[r1 r0]", 1.0, 5.0)]
    assert texts(rank.reductions) == [("r1", 3.0, 6.0), ("r0", 6.0, 7.0)]


def test_gathers_and_frees_do_not_move_reductions() -> None:
    """The first of two begins in the middle of the action, the last at its end; an action of its own at once."""
    costs = replace(costs_of(4.0, 8.0, 1), reductions={0: 1.0, 1: 1.0})
    (rank,) = simulate(plan_of("0F0[g1 f1] w[g1] 0B0[g0 r1 r0 f1 f0] w[r1] r0 w[g0 r0]"), costs).ranks
    assert [start for _, start, _ in texts(rank.reductions)] == [8.0, 12.0, 13.0]


def test_ties_and_clip_meet_their_members() -> None:
    costs = replace(costs_of(1.0, 2.0, 3), ties=0.5, clip=0.25)
    timeline = simulate(plan_of("0F0 t0 CLIP", "1F0 1F1 1F2 1F3 CLIP", "2F0 2F1 t0 CLIP"), costs)
    first, second, third = timeline.ranks
    assert texts(first.waits) == [("t0", 1.0, 2.0), ("CLIP", 2.5, 4.0)]
    assert texts(second.waits) == []
    assert texts(third.waits) == [("CLIP", 2.5, 4.0)]
    assert texts(first.compute)[-2:] == texts(third.compute)[-2:] == [("t0", 2.0, 2.5), ("CLIP", 4.0, 4.25)]


def test_the_critical_path_names_what_each_span_waited_for() -> None:
    costs = replace(costs_of(1.0, 2.0), latency=0.5, reductions={0: 4.0}, clip=0.25)
    plan = plan_of(
        "0F0 0SEND_F0 0RECV_B0 w[0RECV_B0 0SEND_F0] 0B0[r0] w[r0] CLIP",
        "1RECV_F0 w[1RECV_F0] 1F0 1B0 1SEND_B0 w[1SEND_B0] CLIP",
    )
    path = simulate(plan, costs).critical_path
    assert [(rank, str(span.action)) for rank, span in path] == [
        (0, "0F0"), (1, "1RECV_F0"), (1, "1F0"), (1, "1B0"), (0, "0RECV_B0"), (0, "0B0[r0]"), (0, "r0"), (0, "CLIP"),
    ]  # fmt: skip
    assert [span.end for _, span in path] == [1.0, 1.5, 2.5, 4.5, 5.0, 7.0, 11.0, 11.25]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (
            ("w[0RECV_B0]", "1RECV_F0 w[1RECV_F0]"),
            "rank 0 waits in w[0RECV_B0] for 0RECV_B0, which it never starts",
        ),
        (
            ("0RECV_B0 w[0RECV_B0] 0SEND_F0", "1RECV_F0 w[1RECV_F0] 1SEND_B0"),
            "rank 0 waits in w[0RECV_B0] for 0RECV_B0 with rank 1, which waits in w[1RECV_F0] for 1RECV_F0 with rank 0",
        ),
        (
            ("0SEND_F0 w[0SEND_F0]", "1F0"),
            "rank 0 waits in w[0SEND_F0] for 0SEND_F0 with rank 1, which has ended",
        ),
        (
            ("0SEND_F0 0SEND_F1 0RECV_B0 w[0RECV_B0]", "1RECV_F1 w[1RECV_F1] 1RECV_F0 1SEND_B0"),
            "rank 0 waits in w[0RECV_B0] for 0RECV_B0 with rank 1, which waits in w[1RECV_F1] for 1RECV_F0, which it "
            "never starts",
        ),
        (
            ("0F0 t0 CLIP", "1F0 CLIP"),
            "rank 0 waits in t0 for t0 with rank 1, which waits in CLIP for CLIP with rank 0",
        ),
        (("0F0 w[r0]", "1F0"), "rank 0 waits in w[r0] for r0, which it never starts"),
    ],
)
def test_a_plan_that_cannot_finish_says_who_waits_for_whom(lists: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError) as error:
        simulate(plan_of(*lists))
    assert str(error.value) == f"a plan must finish: {message}: `verify` names the rule that is broken"


def test_what_the_plan_or_the_costs_lack_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a duration above 0: B of chunk 0 has 0"):
        simulate(plan_of("0F0 0B0"), Costs({(Kind.F, 0): 1.0}))
    with pytest.raises(ValueError, match="t3 needs a tie 3: the plan has 1 ties"):
        simulate(plan_of("0F0 t3"))
    assert simulate(plan_of("")).makespan == 0.0


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 8), st.integers(1, 16), st.integers(1, 4))
def test_free_links_make_it_the_clock(build_plan: BuildPlan, name: str, p: int, m: int, v: int) -> None:
    plan = build_plan(name, p, m, num_chunks=v)
    timeline = simulate(plan)
    assert computed(timeline) == [list(rank.compute) for rank in clock(plan.actions).ranks]
    assert all(span.duration == 0.0 for rank in timeline.ranks for span in rank.sends + rank.receives)
    assert timeline.peak_live_activations == clock(plan.actions).peak_live_activations


PLANS = st.tuples(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 5), st.integers(1, 8), st.integers(1, 3))
AMOUNTS = st.floats(0.0, 4.0)


def varied(plan: Plan, amounts: Mapping[str, float]) -> Costs:
    """Unit costs made longer; the links take `transfer` for a tensor."""
    units = unit_costs(plan)
    (sizes,) = {chunk.output for chunk in plan.chunks if chunk.output} or {BOUNDARY}
    return Costs(
        {key: duration + amounts[key[0].value] for key, duration in units.compute.items()},
        latency=amounts["latency"],
        bytes_per_time=math.prod(sizes.shape) * 4 / amounts["transfer"] if amounts["transfer"] else math.inf,
        reductions={bucket.index: amounts["reductions"] for bucket in plan.buckets},
        ties=amounts["ties"],
        clip=amounts["clip"],
        step=amounts["step"],
    )


COSTS = st.fixed_dictionaries(
    {name: AMOUNTS for name in ("F", "B", "I", "W", "latency", "transfer", "reductions", "ties", "clip", "step")}
)


@settings(deadline=None, max_examples=60)
@given(PLANS, COSTS, st.data())
def test_nothing_that_takes_longer_makes_the_step_shorter(
    build_plan: BuildPlan, sizes: tuple[str, int, int, int], amounts: dict[str, float], data: st.DataObject
) -> None:
    name, p, m, v = sizes
    plan = build_plan(name, p, m, num_chunks=v)
    longer = data.draw(st.sampled_from(sorted(amounts)))
    before = simulate(plan, varied(plan, amounts)).makespan
    after = simulate(plan, varied(plan, amounts | {longer: amounts[longer] + 1.0})).makespan
    assert after >= before * (1 - 1e-12)


@settings(deadline=None, max_examples=60)
@given(PLANS, COSTS)
def test_the_critical_path_leads_from_the_beginning_to_the_end(
    build_plan: BuildPlan, sizes: tuple[str, int, int, int], amounts: dict[str, float]
) -> None:
    """Each span follows the one before it, and no two of them leave a gap: together they are the makespan."""
    name, p, m, v = sizes
    plan = build_plan(name, p, m, num_chunks=v)
    timeline = simulate(plan, varied(plan, amounts))
    path = timeline.critical_path
    assert path[0][1].start == 0.0 and path[-1][1].end == timeline.makespan
    for (_, before), (rank, span) in itertools.pairwise(path):
        lanes = timeline.ranks[rank]
        assert span in lanes.compute + lanes.sends + lanes.receives + lanes.reductions
        assert before.start <= span.start <= before.end
        early = span.start < before.end
        assert not early or before.action.kind in TRANSFERS or span.action.kind is Kind.REDUCE


@settings(deadline=None, max_examples=60)
@given(PLANS, COSTS)
def test_a_rank_computes_in_list_order_and_waits_only_between(
    build_plan: BuildPlan, sizes: tuple[str, int, int, int], amounts: dict[str, float]
) -> None:
    name, p, m, v = sizes
    plan = build_plan(name, p, m, num_chunks=v)
    own = COMPUTE | {Kind.TIE_REDUCE, Kind.CLIP, Kind.STEP}
    for rank, actions in zip(simulate(plan, varied(plan, amounts)).ranks, plan.actions, strict=True):
        assert [span.action for span in rank.compute] == [action for action in actions if action.kind in own]
        reduces = [sub for action in actions for sub in action.reduces]
        assert [span.action for span in rank.reductions] == reduces
        busy = sorted((*rank.compute, *rank.waits), key=lambda span: (span.start, span.end))
        assert all(before.end == after.start for before, after in itertools.pairwise(busy))
        assert busy[0].start == 0.0 and all(span.duration > 0.0 for span in rank.waits)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(4, 8), pytest.param(16, 64, marks=pytest.mark.slow)])
def test_ten_thousand_ranks_where_replicas_are_alike(num_stages: int, num_microbatches: int) -> None:
    """16 stages of 625 replicas: the number of replicas is in the reductions, which follow a rank's last backward."""
    reduction = ring_time(1e9, 625, 1e9, 1e-3)
    assert reduction == pytest.approx(2 * 624 / 625 + 1.248)
    for name in SCHEDULES:
        made = make_schedule(name, num_stages, num_microbatches, 4)
        last = len(made.ranks) - 1
        chunks = [
            Chunk(rank, (chunk, chunk + 1), BOUNDARY if chunk else None, BOUNDARY if chunk < last else None)
            for chunk, rank in enumerate(made.ranks)
        ]
        buckets = [Bucket(chunk, (chunk,)) for chunk in range(last + 1)]
        plan = lower(made, chunks, buckets, (), num_microbatches, last + 1, training=True)
        costs = replace(unit_costs(plan), reductions={bucket.index: reduction for bucket in buckets})
        computing = clock(plan.actions).makespan
        exposed = simulate(plan, costs).makespan - computing
        num_chunks = len(made.ranks) // num_stages
        # Behind the last backward stands its own bucket, and at most those of the rank's other chunks.
        assert reduction - 1e-9 <= exposed <= num_chunks * reduction + 1e-9
        assert simulate(plan, unit_costs(plan)).makespan == computing


def test_a_ring_of_one_takes_no_time() -> None:
    assert ring_time(1e9, 1, 1.0, 1.0) == 0.0
    assert ring_time(12.0, 2, 4.0, 0.5) == 3.0 + 1.0


def test_actions_of_another_object_are_the_same_actions(build_plan: BuildPlan) -> None:
    """A plan that was parsed shares no object between a send and the wait for it."""
    plan = build_plan("1f1b", 4, 8)
    parsed = replace(plan, actions=tuple(parse_actions(" ".join(map(str, actions))) for actions in plan.actions))
    assert simulate(parsed) == simulate(plan)
    assert Action(Kind.CLIP) in {span.action for span in simulate(parsed).ranks[0].compute}
