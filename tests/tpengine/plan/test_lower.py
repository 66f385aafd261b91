"""Rung: pure. Lowered lists, word for word where small, by their properties where large."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans.random_schedules import schedules

from tpengine.plan import (
    SCHEDULES,
    Bucket,
    Chunk,
    Kind,
    Plan,
    Schedule,
    TensorSpec,
    format_actions,
    forward_only,
    lower,
    make_schedule,
    parse_actions,
    parse_plan,
    slack,
    verify,
)
from tpengine.plan.actions import COMPUTE, INPUT_GRADIENT, RECEIVES, TRANSFERS, counterpart
from tpengine.plan.clock import Value, inputs, output
from tpengine.planner import Costs, simulate
from tpengine.planner.costs import unit_costs

BOUNDARY = TensorSpec((4, 2), "float32")
NAMES = [*sorted(SCHEDULES), "forward_only"]

BuildPlan = Callable[..., Plan]


def schedule_of(ranks: tuple[int, ...], *lists: str) -> Schedule:
    return Schedule("by hand", ranks, tuple(map(parse_actions, lists)))


def lower_plainly(schedule: Schedule, buckets: Sequence[Bucket] = ()) -> Plan:
    """Lower over a model of one layer per chunk, without ties."""
    last = len(schedule.ranks) - 1
    chunks = [
        Chunk(rank, (chunk, chunk + 1), BOUNDARY if chunk else None, BOUNDARY if chunk < last else None)
        for chunk, rank in enumerate(schedule.ranks)
    ]
    return lower(schedule, chunks, buckets, [], schedule.num_microbatches, last + 1, training=True)


def without_waits(plan: Plan, rank: int) -> str:
    return format_actions(action for action in plan.actions[rank] if action.kind is not Kind.WAIT)


def test_two_ranks_word_for_word(build_plan: BuildPlan) -> None:
    plan = build_plan("1f1b", 2, 2)
    assert [format_actions(actions) for actions in plan.actions] == [
        "0F0 0SEND_F0 0F1 w[0SEND_F0] 0SEND_F1 0RECV_B0 w[0RECV_B0] 0B0 0RECV_B1 w[0SEND_F1 0RECV_B1] "
        "0B1[r1 r0] w[r1 r0] t0 CLIP STEP",
        "1RECV_F0 1RECV_F1 w[1RECV_F0] 1F0 1B0 1SEND_B0 w[1RECV_F1] 1F1 1B1[r3 r2] w[1SEND_B0] 1SEND_B1 "
        "w[r3 r2 1SEND_B1] t0 CLIP STEP",
    ]


def test_plan_text_is_complete(build_plan: BuildPlan) -> None:
    lines = build_plan("forward_only", 2, 1).text().splitlines()
    assert lines == [
        "plan forward_only forward microbatches 1 layers 3",
        "chunk 0 rank 0 layers 0:2 input none output float32[128,64] recompute none gathered keep",
        "chunk 1 rank 1 layers 2:3 input float32[128,64] output none recompute none gathered keep",
        "bucket 1 chunks 0 weights whole reduced step",
        "bucket 0 chunks 0 weights whole reduced step",
        "bucket 3 chunks 1 weights whole reduced step",
        "bucket 2 chunks 1 weights whole reduced step",
        "tie 0 chunks 0 1",
        "rank 0: 0F0 0SEND_F0 w[0SEND_F0]",
        "rank 1: 1RECV_F0 w[1RECV_F0] 1F0",
    ]


def test_digest_follows_the_text(build_plan: BuildPlan) -> None:
    assert build_plan("1f1b", 4, 4).digest() == build_plan("1f1b", 4, 4).digest()
    digests = {build_plan(name, 4, m).digest() for name in SCHEDULES for m in (4, 5)}
    assert len(digests) == 2 * len(SCHEDULES)


def test_steady_state_of_1f1b(build_plan: BuildPlan) -> None:
    """The gradient is on its way before the forward that ends with it, and the activation is received after it."""
    plan = build_plan("1f1b", 4, 12)
    for rank in (0, 1, 2):
        own, neighbour = without_waits(plan, rank), without_waits(plan, rank + 1)
        for microbatch in range(4, 12):
            back = microbatch - (3 - rank)
            assert f"{rank}RECV_B{back} {rank}F{microbatch} {rank}SEND_F{microbatch}" in own
            assert f"{rank + 1}SEND_B{back} {rank + 1}RECV_F{microbatch}" in neighbour


def test_one_rank_needs_no_transfers(build_plan: BuildPlan) -> None:
    plan = build_plan("1f1b", 1, 2)
    assert format_actions(plan.actions[0]) == "0F0 0B0 0F1 0B1[r1 r0] w[r1 r0] CLIP STEP"


@pytest.mark.parametrize("num_chunks", [2, 4])
def test_one_rank_needs_no_transfers_for_any_number_of_chunks(build_plan: BuildPlan, num_chunks: int) -> None:
    plan = build_plan("interleaved", 1, 3, num_chunks=num_chunks)
    verify(plan)
    assert not any(action.kind in TRANSFERS for action in plan.actions[0])


def test_chunks_on_the_same_rank_need_no_transfer() -> None:
    plan = lower_plainly(schedule_of((0, 0, 1), "0F0 1F0 1B0 0B0", "2F0 2B0"), [Bucket(0, (1,))])
    verify(plan)
    assert without_waits(plan, 0) == "0F0 1F0 1SEND_F0 1RECV_B0 1B0[r0] 0B0 CLIP STEP"


V_SHAPED = schedule_of(
    (0, 1, 1, 0), "0F0 0F1 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0I1 0W0 0W1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"
)


def test_v_shaped_word_for_word() -> None:
    plan = lower_plainly(V_SHAPED, [Bucket(0, (3,)), Bucket(1, (0,)), Bucket(2, (0, 3))])
    verify(plan)
    assert [format_actions(actions) for actions in plan.actions] == [
        "0F0 0SEND_F0 0F1 w[0SEND_F0] 0SEND_F1 3RECV_F0 w[3RECV_F0] 3F0 3I0 3SEND_B0 3RECV_F1 3W0 w[3RECV_F1] 3F1 "
        "3I1 w[3SEND_B0] 3SEND_B1 0RECV_B0 w[0RECV_B0] 0I0 3W1[r0] 0RECV_B1 w[0SEND_F1 0RECV_B1] 0I1 0W0 0W1[r1 r2] "
        "w[3SEND_B1 r0 r1 r2] CLIP STEP",
        "1RECV_F0 1RECV_F1 w[1RECV_F0] 1F0 2F0 2SEND_F0 w[1RECV_F1] 1F1 2RECV_B0 2F1 w[2SEND_F0] 2SEND_F1 "
        "w[2RECV_B0] 2B0 2RECV_B1 1B0 1SEND_B0 w[2SEND_F1 2RECV_B1] 2B1 1B1 w[1SEND_B0] 1SEND_B1 w[1SEND_B1] CLIP STEP",
    ]


def test_split_backward_reduces_in_its_last_half() -> None:
    schedule = schedule_of((0, 1), "0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    plan = lower_plainly(schedule, [Bucket(0, (0,)), Bucket(1, (1,))])
    verify(plan)
    assert "0I1 0W1[r0]" in without_waits(plan, 0)
    assert "1I1 1SEND_B1 1W0 1W1[r1]" in without_waits(plan, 1)


def test_a_bucket_of_two_chunks_waits_for_both() -> None:
    early = schedule_of((0, 1, 0), "0F0 2F0 2I0 2W0 0I0 0W0", "1F0 1B0")
    late = schedule_of((0, 1, 0), "0F0 2F0 2I0 0I0 0W0 2W0", "1F0 1B0")
    buckets = [Bucket(0, (2,)), Bucket(1, (0, 2)), Bucket(2, (0,))]
    plans = [lower_plainly(schedule, buckets) for schedule in (early, late)]
    for plan in plans:
        verify(plan)
    assert without_waits(plans[0], 0).endswith("2W0[r0] 0RECV_B0 0I0 0W0[r1 r2] CLIP STEP")
    assert without_waits(plans[1], 0).endswith("0I0 0W0[r2] 2W0[r0 r1] CLIP STEP")


def test_transfers_are_waited_for_one_by_one(build_plan: BuildPlan) -> None:
    text = format_actions(build_plan("1f1b", 4, 12).actions[1])
    # The gradient is read at once; the activation sent before it goes on until the chunk's next send.
    assert "1F4 w[1SEND_F3] 1SEND_F4 w[1RECV_B2] 1B2" in text
    assert "1F5 w[1SEND_F4] 1SEND_F5 w[1RECV_B3] 1B3" in text


def test_lists_and_chunks_must_agree() -> None:
    with pytest.raises(
        ValueError, match=r"lists use chunks \[0, 1\] on ranks \[0, 1\], the chunks are on ranks \[0\]: g"
    ):
        lower(make_schedule("1f1b", 2, 1), [Chunk(0, (0, 1), None, None)], [], [], 1, 1, training=True)


@pytest.mark.parametrize("num_chunks", [1, 3, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_all_ranks_post_in_one_order(name: str, num_chunks: int) -> None:
    """They do even if a chunk takes a third of a unit, which sums of floats do not hit exactly."""
    schedule = make_schedule(name, 4, 11, num_chunks)
    plan = lower_plainly(schedule)
    # What each rank does in turn, transfers by their send: circles would stay in it for ever.
    after: dict[str, set[str]] = {}
    for actions in plan.actions:
        names = [
            str(counterpart(action) if action.kind in RECEIVES else action)
            for action in actions
            if action.kind in COMPUTE | TRANSFERS
        ]
        for before, following in itertools.pairwise(names):
            after.setdefault(following, set()).add(before)
    assert len(list(TopologicalSorter(after).static_order())) == len(set(after).union(*after.values()))


@pytest.mark.by_default("zbv-3", "interleaved-2", "1f1b-6")
@pytest.mark.parametrize("p", [2, 3, 4, 6])
@pytest.mark.parametrize("name", SCHEDULES)
def test_early_receives_hide_the_latency_of_links(name: str, p: int) -> None:
    """Beside ranks that have posted all receives before they begin: what these lose too, nothing hides."""
    for m in (1, 2, p, p + 1, 2 * p, 3 * p + 1, 24):
        plan = lower_plainly(make_schedule(name, p, m, 3))
        costs = replace(unit_costs(plan), latency=0.1)
        undelayed = simulate(plan).makespan
        lost = simulate(plan, costs).makespan - undelayed
        inevitable = makespan_of_eager_ranks(plan, costs) - undelayed
        # Where two ranks end actions for each other at once, one of them posts its receive only then.
        allowed = inevitable * (1.25 if name == "1f1b" or (name == "zbv" and m <= p) else 1.0)
        if name == "interleaved" and m > p:
            allowed = 0.11 * undelayed
        assert inevitable - 1e-9 <= lost <= allowed + 1e-9, m


def makespan_of_eager_ranks(plan: Plan, costs: Costs) -> float:
    """The end of the last compute action if each tensor leaves when it exists, and is there a latency later."""
    lists = [[action for action in actions if action.kind in COMPUTE] for actions in plan.actions]
    last, now, place = len(plan.chunks) - 1, [0.0] * len(lists), [0] * len(lists)
    ready: dict[Value, float] = {}
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while place[rank] < len(actions):
                action = actions[place[rank]]
                needed = inputs(action, last)
                if any(value not in ready for value in needed):
                    break
                arrivals = [
                    ready[value] + (costs.latency if plan.chunks[value[1]].rank != rank else 0.0) for value in needed
                ]
                now[rank] = ready[output(action)] = max(now[rank], *arrivals, 0.0) + costs.duration(action)
                place[rank] += 1
                moved = True
    return max(now)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_slack_grows_with_the_rank(name: str) -> None:
    assert slack(make_schedule(name, 4, 6)) == (0.0, 2.0, 4.0, 6.0)
    durations = {(kind, chunk): 3.0 if kind is Kind.B else 1.0 for kind in Kind for chunk in range(4)}
    assert slack(make_schedule(name, 4, 6), durations) == (0.0, 3.0, 6.0, 9.0)


def test_slack_is_counted_from_the_weight_half() -> None:
    # All ends at 8: 0W1 is last, 1B1 ends at 6.5, 2B1 and 3W1 at 5.5.
    assert slack(V_SHAPED) == (0.0, 1.5, 2.5, 2.5)
    schedule = schedule_of((0, 1), "0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    assert slack(schedule) == (0.0, 0.0)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12), (8, 16)])
def test_slack_of_zbv(p: int, m: int) -> None:
    """Rank r starts r/2 late and is never idle until it ends, so the last rank ends the step, (p-1-r)/2 after it."""
    found = slack(make_schedule("zbv", p, m))
    assert [min(found[rank], found[2 * p - 1 - rank]) for rank in range(p)] == [(p - 1 - rank) / 2 for rank in range(p)]


def test_slack_needs_backwards() -> None:
    with pytest.raises(
        ValueError, match=r"slack needs a backward of every chunk: forward_only has none of chunks \[0, 1\]"
    ):
        slack(forward_only((0, 1), 2))


def check(plan: Plan) -> None:
    verify(plan)
    assert parse_plan(plan.text()) == plan


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.sampled_from(NAMES), st.integers(1, 8), st.integers(1, 16), st.integers(1, 4), st.booleans())
def test_every_plan_verifies(build_plan: BuildPlan, name: str, p: int, m: int, v: int, has_buckets: bool) -> None:
    check(build_plan(name, p, m, has_buckets, num_chunks=v))


@pytest.mark.slow
@pytest.mark.parametrize("p", range(1, 17))
@pytest.mark.parametrize("name", NAMES)
def test_every_plan_of_the_grid_verifies(build_plan: BuildPlan, name: str, p: int) -> None:
    """All m up to 25 and some beyond; where p is large those around p, 3p/2, 2p and 4p."""
    around = {m for places in (p, 3 * p // 2, 2 * p, 4 * p) for m in (places - 1, places, places + 1)}
    every_m = (*range(1, 26), 31, 32, 33, 48, 63, 64) if p <= 8 else (1, 2, 3, *sorted(around))
    for num_chunks in range(1, 5) if name == "interleaved" else [1]:
        for m in every_m:
            check(build_plan(name, p, m, num_chunks=num_chunks))


@settings(derandomize=True, deadline=None, max_examples=75)
@given(schedules())
def test_any_order_of_compute_lowers_to_a_plan_that_verifies(schedule: Schedule) -> None:
    ranks = schedule.ranks
    num_chunks = len(ranks)
    buckets = [Bucket(chunk, (chunk,)) for chunk in range(num_chunks)]
    if num_chunks > 1 and ranks[0] == ranks[-1]:
        buckets.append(Bucket(num_chunks, (0, num_chunks - 1)))
    plan = lower_plainly(schedule, buckets)
    check(plan)
    for actions in plan.actions:
        reduced = [sub.index for action in actions for sub in action.reduces]
        assert len(reduced) == len(set(reduced))
        assert not any(action.reduces for action in actions if action.kind in INPUT_GRADIENT - {Kind.B})
