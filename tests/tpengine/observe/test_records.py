"""Rung: pure. Records of ranks as timelines, costs and Chrome traces: by hand, and of simulated steps, whose truth is
known. That real ranks record so is in tests/tpengine/training/profiler/test_profiler.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from support.plans.records import recorded

from tpengine.observe.chrome_trace import TracedRank, TracedStep, chrome_trace
from tpengine.observe.records import (
    MeasuredStep,
    RankRecord,
    clock_offsets,
    computed_until,
    decode_record,
    encode_record,
    measured_timeline,
)
from tpengine.plan import (
    Kind,
    Plan,
    Reduced,
    Residency,
    Span,
    Weights,
    lower,
    make_schedule,
    parse_action,
    parse_actions,
    verify,
)
from tpengine.plan.clock import unit_durations
from tpengine.planner import Costs, StepFigures, simulate
from tpengine.planner.costs import spec_bytes
from tpengine.planner.profiles.costs import costs_for
from tpengine.planner.profiles.record_costs import profile_of

BuildPlan = Callable[..., Plan]
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")

TWO_RANKS = (
    "rank 0: 0F0 0SEND_F0 0RECV_B0 w[0SEND_F0 0RECV_B0] 0B0[r0] w[r0] CLIP STEP",
    "rank 1: 1RECV_F0 w[1RECV_F0] 1F0 1B0[r1] 1SEND_B0 w[r1 1SEND_B0] CLIP STEP",
)
# Text, begin and end of what each rank ran, in milliseconds.
RAN = (
    [
        *[("0F0", 0, 10), ("0SEND_F0", 10, 12), ("0RECV_B0", 12, 12), ("w[0SEND_F0 0RECV_B0]", 12, 45)],
        *[("0B0[r0]", 45, 65), ("r0", 60, 60), ("w[r0]", 65, 66), ("CLIP", 66, 70), ("STEP", 70, 80)],
    ],
    [
        *[("1RECV_F0", 1, 1), ("w[1RECV_F0]", 1, 15), ("1F0", 15, 25), ("1B0[r1]", 25, 40), ("r1", 35, 35)],
        *[("1SEND_B0", 40, 41), ("w[r1 1SEND_B0]", 41, 50), ("CLIP", 50, 70), ("STEP", 70, 79)],
    ],
)
WAITED: tuple[list[tuple[str, int, int, bool, int | None]], ...] = (
    [("0SEND_F0", 12, 13, True, None), ("0RECV_B0", 13, 45, False, None), ("r0", 65, 66, True, 64)],
    [("1RECV_F0", 1, 15, False, None), ("r1", 41, 49, False, None), ("1SEND_B0", 49, 50, True, None)],
)
MS = 1_000_000


def two_ranks(copies: bool, ahead_ns: int = 0) -> tuple[RankRecord, ...]:
    """The records above; rank 1's clock may be ahead, which decoding takes away."""
    records = []
    for rank, (ran, waited) in enumerate(zip(RAN, WAITED, strict=True)):
        ahead = ahead_ns if rank else 0
        encoded = encode_record(
            [(text, begin * MS + ahead, end * MS + ahead) for text, begin, end in ran],
            [
                (text, begin * MS + ahead, end * MS + ahead, complete, None if done is None else done * MS + ahead)
                for text, begin, end, complete, done in waited
            ],
            copies,
        )
        records.append(decode_record(encoded, parse_actions(TWO_RANKS[rank].partition(": ")[2]), ahead))
    return tuple(records)


def two_rank_plan(build_plan: BuildPlan) -> Plan:
    plan = build_plan("1f1b", 2, 1, has_buckets=False)
    return replace(plan, actions=tuple(parse_actions(text.partition(": ")[2]) for text in TWO_RANKS), ties=())


def in_ms(spans: tuple[Span, ...]) -> list[tuple[str, float, float]]:
    return [(str(span.action), round(span.start * 1e3, 6), round(span.end * 1e3, 6)) for span in spans]


@pytest.mark.parametrize("copies", [False, True], ids=["process group", "mailbox"])
@pytest.mark.parametrize("ahead_ns", [0, -(10**15)], ids=["one clock", "two clocks"])
def test_a_timeline_by_hand(build_plan: BuildPlan, copies: bool, ahead_ns: int) -> None:
    first, second = measured_timeline(two_rank_plan(build_plan), two_ranks(copies, ahead_ns)).ranks
    assert in_ms(first.compute) == [("0F0", 0, 10), ("0B0[r0]", 45, 65), ("CLIP", 66, 70), ("STEP", 70, 80)]
    # Rank 1 comes to CLIP at 50 and stands there until rank 0 comes at 66.
    assert in_ms(second.compute) == [("1F0", 15, 25), ("1B0[r1]", 25, 40), ("CLIP", 66, 70), ("STEP", 70, 79)]
    assert in_ms(first.waits) == [("w[0SEND_F0 0RECV_B0]", 12, 45), ("w[r0]", 65, 66)]
    assert in_ms(second.waits) == [("w[1RECV_F0]", 1, 15), ("w[r1 1SEND_B0]", 41, 50), ("CLIP", 50, 66)]
    # r0 was found complete and knows when it was; r1 was waited for.
    assert (in_ms(first.reductions), in_ms(second.reductions)) == ([("r0", 60, 64)], [("r1", 35, 49)])
    if copies:
        assert (in_ms(first.sends), in_ms(second.receives)) == ([("0SEND_F0", 10, 12)], [("1RECV_F0", 10, 15)])
        assert (in_ms(second.sends), in_ms(first.receives)) == ([("1SEND_B0", 40, 41)], [("0RECV_B0", 40, 45)])
    else:
        assert (in_ms(first.sends), in_ms(second.receives)) == ([("0SEND_F0", 10, 15)], [("1RECV_F0", 10, 15)])
        assert (in_ms(second.sends), in_ms(first.receives)) == ([("1SEND_B0", 40, 45)], [("0RECV_B0", 40, 45)])


@pytest.mark.parametrize("copies", [False, True], ids=["process group", "mailbox"])
def test_figures_by_hand(build_plan: BuildPlan, copies: bool) -> None:
    """Waiting for what is under way is exposed, for what has not begun bubble."""
    plan = two_rank_plan(build_plan)
    figures = StepFigures.of(plan, measured_timeline(plan, two_ranks(copies)))
    first, second = figures.ranks
    assert (round(first.exposed * 1e3), round(first.bubble * 1e3)) == (5 + 1, 28)
    # 10 to 15 for the activation, 41 to 50 for the bucket; 1 to 10 and 50 to 66 for rank 0 to come.
    assert (round(second.exposed * 1e3), round(second.bubble * 1e3)) == (5 + 9, 9 + 16)
    assert figures.sentence() == "stage 0 waits 41 % of the step on stage 1"


@pytest.mark.parametrize("copies", [False, True], ids=["process group", "mailbox"])
def test_what_was_there_when_asked_for_ended_then_at_the_latest(build_plan: BuildPlan, copies: bool) -> None:
    """The sender's copy is seen; the receiver's copy is the transfer on its side."""
    first, second = two_ranks(copies)
    receive = parse_action("1RECV_F0")
    late = second.waited[receive][0]._replace(begin_ns=14 * MS, was_complete=True)
    second = replace(second, waited={**second.waited, receive: [late]})
    timeline = measured_timeline(two_rank_plan(build_plan), (first, second))
    (send,), (received,) = in_ms(timeline.ranks[0].sends), in_ms(timeline.ranks[1].receives)
    assert send[1:] == ((10, 12) if copies else (10, 14))
    assert received[1:] == ((14, 15) if copies else (10, 14))


def test_a_reduction_that_nobody_saw_end_ended_when_it_was_asked_for_at_the_latest(build_plan: BuildPlan) -> None:
    first, second = two_ranks(copies=True)
    reduction = parse_action("r0")
    unseen = first.waited[reduction][0]._replace(done_ns=None)
    first = replace(first, waited={**first.waited, reduction: [unseen]})
    timeline = measured_timeline(two_rank_plan(build_plan), (first, second))
    assert in_ms(timeline.ranks[0].reductions) == [("r0", 60, 65)]


def test_a_pipeline_has_computed_when_its_last_backward_ends() -> None:
    assert computed_until(two_ranks(copies=False)) == 65 * MS


def test_what_ran_must_be_the_list() -> None:
    actions = parse_actions(TWO_RANKS[0].partition(": ")[2])
    for damaged in (RAN[0][1:], RAN[0][:-1], [*RAN[0], ("STEP", 80, 81)], [*RAN[0][:5], *RAN[0][6:]]):
        with pytest.raises(ValueError, match="what ran must be the plan's list: got") as error:
            decode_record(encode_record(damaged, WAITED[0], False), actions)
        assert "\n" not in str(error.value)


def test_the_clocks_of_hosts_are_set_by_meetings() -> None:
    # Ranks 0 and 1 on one host, 2 and 3 on another whose clock is 5,000 ahead; one meeting is left late.
    meetings = [(100, 103, 5101, 5107), (200, 202, 5900, 5950), (301, 300, 5302, 5300)]
    assert clock_offsets([7, 7, 9, 9], list(zip(*meetings, strict=True))) == [0, 0, 5001, 5001]
    assert clock_offsets([7], [[1, 2, 3]]) == [0]


def costs_of(plan: Plan, link: float = 0.01) -> Costs:
    """Costs in which nothing is a multiple of anything else, in seconds."""
    lengths = unit_durations({chunk: 1 for chunk in range(len(plan.chunks))})
    assert plan.chunks[0].output is not None
    return Costs(
        compute={(kind, chunk): seconds * (1.0 + 0.01 * chunk) for (kind, chunk), seconds in lengths.items()},
        bytes_per_time=spec_bytes(plan.chunks[0].output) / link,
        reductions={bucket.index: 0.3 + 0.02 * bucket.index for bucket in plan.buckets},
        ties=0.11,
        clip=0.07,
        step=0.23,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
def test_a_simulated_step_is_measured_as_it_was(build_plan: BuildPlan, schedule: str, p: int, m: int) -> None:
    plan = build_plan(schedule, p, m)
    simulated = simulate(plan, costs_of(plan))
    measured = measured_timeline(plan, recorded(plan, simulated))
    for was, now in zip(simulated.ranks, measured.ranks, strict=True):
        assert [str(span.action) for span in now.compute] == [str(span.action) for span in was.compute]
        assert [(span.start, span.end) for span in now.compute] == [
            (pytest.approx(span.start, abs=1e-8), pytest.approx(span.end, abs=1e-8)) for span in was.compute
        ]
        assert sum(span.duration for span in now.waits) == pytest.approx(sum(s.duration for s in was.waits), abs=1e-6)
        assert {span.action for span in now.sends} == {span.action for span in was.sends}
        assert [span.end for span in now.reductions] == pytest.approx([span.end for span in was.reductions], abs=1e-8)
    assert measured.makespan == pytest.approx(simulated.makespan, abs=1e-8)
    was_figures, figures = StepFigures.of(plan, simulated), StepFigures.of(plan, measured)
    assert figures.bubble == pytest.approx(was_figures.bubble, abs=1e-6)
    assert figures.waited == pytest.approx(was_figures.waited, abs=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_costs_of_a_step_give_the_step(build_plan: BuildPlan, schedule: str) -> None:
    """Three steps of two pipelines each, one of them with an interrupt, which the medians leave out."""
    plan = build_plan(schedule, 4, 8)
    costs = costs_of(plan)
    simulated = simulate(plan, costs)
    records = recorded(plan, simulated)
    (first, *rest) = records
    *ran, last = first.ran
    delayed = (replace(first, ran=(*ran, last._replace(end_ns=last.end_ns + 10**10))), *rest)
    steps = [
        MeasuredStep(number, simulated.makespan + 0.5, (records, delayed if number == 1 else records))
        for number in range(3)
    ]
    profile = profile_of(plan, steps, {bucket.index: 100 for bucket in plan.buckets})
    for index, chunk in enumerate(profile.chunks):
        for kind, seconds in chunk.seconds.items():
            assert seconds == pytest.approx(costs.compute[kind, index], abs=1e-8)
    used = {action.kind for actions in plan.actions for action in actions}
    assert profile.ties == pytest.approx(costs.ties if Kind.TIE_REDUCE in used else 0.0, abs=1e-8)
    assert (profile.clip, profile.step) == pytest.approx((costs.clip, costs.step), abs=1e-8)
    assert {i: bucket.seconds for i, bucket in profile.buckets.items()} == pytest.approx(costs.reductions, abs=1e-8)
    assert profile.link_seconds == pytest.approx(0.01, rel=0.01)
    assert (profile.plan_seconds, profile.outside_seconds) == pytest.approx((simulated.makespan, 0.5), abs=1e-6)
    assert simulate(plan, costs_for(profile, plan)).makespan == pytest.approx(simulated.makespan, rel=1e-3)


@pytest.mark.parametrize("residency", Residency)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_the_costs_of_a_sharded_step_give_its_gathers(
    build_plan: BuildPlan, schedule: str, residency: Residency
) -> None:
    whole = build_plan(schedule, 2, 4)
    buckets = [replace(bucket, weights=Weights.SLICED, reduced=Reduced.MICROBATCH) for bucket in whole.buckets]
    made = make_schedule(schedule, 2, 4)
    plan = lower(made, whole.chunks, buckets, whole.ties, 4, whole.num_layers, training=True, residency=residency)
    verify(plan)
    costs = replace(costs_of(plan), gathers={bucket.index: 0.2 + 0.03 * bucket.index for bucket in buckets})
    simulated = simulate(plan, costs)
    step = MeasuredStep(0, simulated.makespan, (recorded(plan, simulated),))
    profile = profile_of(plan, [step], {bucket.index: 100 for bucket in buckets}, residency)
    assert {i: b.gather_seconds for i, b in profile.buckets.items()} == pytest.approx(costs.gathers, abs=1e-8)
    assert {i: b.seconds for i, b in profile.buckets.items()} == pytest.approx(costs.reductions, abs=1e-8)
    assert {(b.weights, b.reduced) for b in profile.buckets.values()} == {(Weights.SLICED, Reduced.MICROBATCH)}
    assert profile.residency is residency
    assert simulate(plan, costs_for(profile, plan)).makespan == pytest.approx(simulated.makespan, rel=1e-3)


def spans_nest(spans: list[dict[str, Any]]) -> bool:
    """Whether of any two spans one ends before the other begins, or lies in it."""
    open_ends: list[float] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        while open_ends and open_ends[-1] <= span["ts"] + 1e-6:
            open_ends.pop()
        if open_ends and span["ts"] + span["dur"] > open_ends[-1] + 1e-6:
            return False
        open_ends.append(span["ts"] + span["dur"])
    return True


def test_spans_nest_can_fail() -> None:
    assert spans_nest([{"ts": 0, "dur": 4}, {"ts": 1, "dur": 3}, {"ts": 4, "dur": 1}])
    assert not spans_nest([{"ts": 0, "dur": 4}, {"ts": 1, "dur": 4}])


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_a_chrome_trace_has_every_action_and_its_spans_nest(build_plan: BuildPlan, schedule: str) -> None:
    plan = build_plan(schedule, 2, 4)
    slow = replace(costs_of(plan), reductions=dict.fromkeys(range(len(plan.buckets) + 1), 3.0))
    records = recorded(plan, simulate(plan, slow))
    # Of buckets that start in one action the second starts before the first is there.
    timeline = measured_timeline(plan, records)
    assert any(a.end > b.start for rank in timeline.ranks for a, b in pairwise(rank.reductions))
    ranks = [
        TracedRank(rank, f"stage {rank}", [TracedStep(3, records[rank], timeline.ranks[rank])]) for rank in range(2)
    ]
    events = json.loads(chrome_trace(ranks, 0))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["stage 0", "stage 1"]
    for rank, actions in enumerate(plan.actions):
        names = {e["tid"]: e["args"]["name"] for e in events if e["pid"] == rank and e["name"] == "thread_name"}
        assert {name.split()[0] for name in names.values()} == {"compute", "sends", "receives", "gathers", "reductions"}
        threads = dict(threads_of(events, rank, names))
        assert all(spans_nest(spans) for spans in threads.values()), rank
        listed = [e["name"] for e in threads["compute"] if "was_complete" not in e["args"]]
        assert listed == [str(action) for action in actions]
        awaited = [e["name"] for e in threads["compute"] if "was_complete" in e["args"]]
        assert awaited == [str(sub) for action in actions if action.kind is Kind.WAIT for sub in action.subs]
        sends = [e for name, spans in threads.items() if name.startswith("sends") for e in spans]
        assert len(sends) == len(timeline.ranks[rank].sends)
        forward = next(e for e in threads["compute"] if e["cat"] == "F")
        chunk, microbatch = parse_action(forward["name"]).piece
        assert forward["args"] == {"step": 3, "chunk": chunk, "micro_batch": microbatch}
        assert forward["dur"] == pytest.approx(timeline.ranks[rank].compute[0].duration * 1e6, abs=1e-2)


def threads_of(
    events: list[dict[str, Any]], rank: int, names: dict[int, str]
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for thread, name in names.items():
        yield name, [e for e in events if e["ph"] == "X" and e["pid"] == rank and e["tid"] == thread]
