"""Rung: pure. Gathers, frees and reductions of sharded data parallelism: by hand, by count, and of random schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans.held_bytes import held_bytes
from support.plans.oracle import why_illegal
from support.plans.random_schedules import schedules
from support.plans.sharded import lower_with, sharded

from tpengine.plan import (
    SCHEDULES,
    Action,
    Bucket,
    Kind,
    Plan,
    Reduced,
    Residency,
    Schedule,
    Weights,
    format_actions,
    make_schedule,
    parse_plan,
    verify,
)
from tpengine.plan.actions import BUCKET, COMPUTE


def computing(plan: Plan, rank: int) -> str:
    """The rank's list without transfers, waits and the ending."""
    return format_actions(a for a in plan.actions[rank] if a.kind in COMPUTE | BUCKET)


def count(actions: Sequence[Action], kind: Kind) -> Counter[int | None]:
    """How often each bucket is gathered, reduced or freed."""
    subs = (sub for action in actions if action.kind is not Kind.WAIT for sub in (action, *action.subs))
    return Counter(sub.index for sub in subs if sub.kind is kind)


def test_a_small_plan_word_for_word() -> None:
    """Kept: chunk 3 is gathered while chunk 0 runs first. For one use: chunk 3 follows F0 of chunk 0, then itself."""
    kept, used = (sharded("zbv", 2, 2, residency) for residency in Residency)
    assert format_actions(kept.actions[0]) == (
        "g0 w[g0] 0F0[g3] 0SEND_F0 0F1 w[0SEND_F0] 0SEND_F1 3RECV_F0 w[g3 3RECV_F0] 3F0 3I0 3SEND_B0 3RECV_F1 "
        "w[3RECV_F1] 3F1 3I1 w[3SEND_B0] 3SEND_B1 0RECV_B0 w[0RECV_B0] 0I0 0RECV_B1 3W0[r3] w[0SEND_F1 0RECV_B1] 0I1 "
        "w[r3] 3W1[r3 f3] 0W0[r0] w[r0] 0W1[r0 f0] w[3SEND_B1 r3 r0] CLIP STEP"
    )
    assert format_actions(used.actions[0]) == (
        "g0 w[g0] 0F0[f0] g0 0SEND_F0 w[g0] 0F1[g3 f0] w[0SEND_F0] 0SEND_F1 3RECV_F0 w[g3 3RECV_F0] 3F0[f3] g3 w[g3] "
        "3I0 3SEND_B0 3RECV_F1 w[3RECV_F1] 3F1 3I1[g0] w[3SEND_B0] 3SEND_B1 0RECV_B0 w[g0 0RECV_B0] 0I0 0RECV_B1 "
        "3W0[r3] w[0SEND_F1 0RECV_B1] 0I1 w[r3] 3W1[r3 f3] 0W0[r0] w[r0] 0W1[r0 f0] w[3SEND_B1 r3 r0] CLIP STEP"
    )


# Of the first and the last rank. p 4, m 8, zero 3: weights sliced, reduced every micro-batch.
GOLDENS = {
    ("1f1b", Residency.STEP): (
        "g0 0F0 0F1 0F2 0F3 0B0[r0] 0F4 0B1[r0] 0F5 0B2[r0] 0F6 0B3[r0] 0F7 0B4[r0] 0B5[r0] 0B6[r0] 0B7[r0 f0]",
        "g3 3F0 3B0[r3] 3F1 3B1[r3] 3F2 3B2[r3] 3F3 3B3[r3] 3F4 3B4[r3] 3F5 3B5[r3] 3F6 3B6[r3] 3F7 3B7[r3 f3]",
    ),
    ("1f1b", Residency.USE): (
        "g0 0F0[f0] g0 0F1[f0] g0 0F2[f0] g0 0F3[f0] g0 0B0[r0 f0] g0 0F4[f0] g0 0B1[r0 f0] g0 0F5[f0] g0 0B2[r0 f0] "
        "g0 0F6[f0] g0 0B3[r0 f0] g0 0F7[f0] g0 0B4[r0 f0] g0 0B5[r0 f0] g0 0B6[r0 f0] g0 0B7[r0 f0]",
        "g3 3F0[f3] g3 3B0[r3 f3] g3 3F1[f3] g3 3B1[r3 f3] g3 3F2[f3] g3 3B2[r3 f3] g3 3F3[f3] g3 3B3[r3 f3] "
        "g3 3F4[f3] g3 3B4[r3 f3] g3 3F5[f3] g3 3B5[r3 f3] g3 3F6[f3] g3 3B6[r3 f3] g3 3F7[f3] g3 3B7[r3 f3]",
    ),
    ("zbv", Residency.STEP): (
        "g0 0F0[g7] 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0[r7] 7F1 7I1 7W1[r7] 7F2 7I2 7W2[r7] 7F3 7I3 7W3[r7] 0F7 0I0 "
        "0W0[r0] 7F4 7I4 7W4[r7] 0I1 0W1[r0] 7F5 7I5 7W5[r7] 0I2 0W2[r0] 7F6 7I6 7W6[r7] 0I3 0W3[r0] 7F7 7I7 0I4 "
        "7W7[r7 f7] 0I5 0W4[r0] 0I6 0W5[r0] 0I7 0W6[r0] 0W7[r0 f0]",
        "g3 3F0[g4] 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4I0 4W0[r4] 3F4 3I0 3W0[r3] 4F4 4I1 4W1[r4] 3F5 3I1 3W1[r3] 4F5 4I2 "
        "4W2[r4] 3F6 3I2 3W2[r3] 4F6 4I3 4W3[r4] 3F7 3I3 3W3[r3] 4F7 4I4 3I4 4I5 3I5 4I6 3I6 4I7 3I7 4W4[r4] 3W4[r3] "
        "4W5[r4] 3W5[r3] 4W6[r4] 3W6[r3] 4W7[r4 f4] 3W7[r3 f3]",
    ),
    ("zbv", Residency.USE): (
        "g0 0F0[f0] g0 0F1[f0] g0 0F2[f0] g0 0F3[f0] g0 0F4[f0] g0 0F5[f0] g0 0F6[g7 f0] 7F0[f7] g7 7I0 7W0[r7 f7] g7 "
        "7F1[f7] g7 7I1 7W1[r7 f7] g7 7F2[f7] g7 7I2 7W2[r7 f7] g7 7F3[f7] g7 7I3 7W3[g0 r7 f7] 0F7[f0] g0 0I0 "
        "0W0[g7 r0 f0] 7F4[f7] g7 7I4 7W4[g0 r7 f7] 0I1 0W1[g7 r0 f0] 7F5[f7] g7 7I5 7W5[g0 r7 f7] 0I2 0W2[g7 r0 f0] "
        "7F6[f7] g7 7I6 7W6[g0 r7 f7] 0I3 0W3[g7 r0 f0] 7F7[f7] g7 7I7[g0] 0I4 7W7[r7 f7] 0I5 0W4[r0] 0I6 0W5[r0] 0I7 "
        "0W6[r0] 0W7[r0 f0]",
        "g3 3F0[g4 f3] 4F0[g3 f4] 3F1[g4 f3] 4F1[g3 f4] 3F2[g4 f3] 4F2[g3 f4] 3F3[g4 f3] 4F3[f4] g4 4I0 4W0[g3 r4 f4] "
        "3F4[f3] g3 3I0 3W0[g4 r3 f3] 4F4[f4] g4 4I1 4W1[g3 r4 f4] 3F5[f3] g3 3I1 3W1[g4 r3 f3] 4F5[f4] g4 4I2 "
        "4W2[g3 r4 f4] 3F6[f3] g3 3I2 3W2[g4 r3 f3] 4F6[f4] g4 4I3 4W3[g3 r4 f4] 3F7[f3] g3 3I3 3W3[g4 r3 f3] 4F7[f4] "
        "g4 4I4[g3] 3I4 4I5 3I5 4I6 3I6 4I7 3I7 4W4[r4] 3W4[r3] 4W5[r4] 3W5[r3] 4W6[r4] 3W6[r3] 4W7[r4 f4] 3W7[r3 f3]",
    ),
}
# By rank: gathers, as many frees, reductions, and the most weights held at once, in those of a chunk. In zbv the last
# backwards overlap: micro-batches 4 to 7 of the first chunk share a window, as do the last 1, 2, 3, 4 of the second.
FIGURES = {
    ("1f1b", Residency.STEP): [(1, 8, 1)] * 4,
    ("1f1b", Residency.USE): [(16, 8, 1)] * 4,
    ("zbv", Residency.STEP): [(2, 16, 2)] * 4,
    ("zbv", Residency.USE): [(13 + 16, 16, 2), (13 + 15, 16, 2), (13 + 14, 16, 2), (13 + 13, 16, 2)],
}


@pytest.mark.parametrize(("name", "residency"), GOLDENS)
def test_zero_3_of_four_ranks_and_eight_micro_batches(name: str, residency: Residency) -> None:
    plan = sharded(name, 4, 8, residency)
    verify(plan)
    assert (computing(plan, 0), computing(plan, 3)) == GOLDENS[name, residency]
    sizes = dict.fromkeys(range(len(plan.chunks)), 1.0)
    for rank, (num_gathers, num_reductions, peak) in enumerate(FIGURES[name, residency]):
        counts = [count(plan.actions[rank], kind).total() for kind in (Kind.GATHER, Kind.FREE, Kind.REDUCE)]
        assert counts == [num_gathers, num_gathers, num_reductions]
        assert max(held_bytes(plan, rank, sizes)) == peak


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_counts_are_the_traffic(name: str) -> None:
    """Each bucket has 0, 1, 1 or 2m gathers, and 1 or m reductions."""
    for p, m in ((1, 1), (2, 3), (3, 2), (4, 8)):
        for weights, residency, num_gathers in (
            (Weights.WHOLE, Residency.USE, 0),
            (Weights.UPDATED, Residency.USE, 1),
            (Weights.SLICED, Residency.STEP, 1),
            (Weights.SLICED, Residency.USE, 2 * m),
        ):
            for reduced, num_reductions in ((Reduced.STEP, 1), (Reduced.MICROBATCH, m)):
                plan = sharded(name, p, m, residency, weights, reduced)
                verify(plan)
                for index, chunk in enumerate(plan.chunks):
                    gathers, reductions, frees = (
                        count(plan.actions[chunk.rank], kind)[index] for kind in (Kind.GATHER, Kind.REDUCE, Kind.FREE)
                    )
                    assert (gathers, reductions) == (num_gathers, num_reductions)
                    assert frees == (num_gathers if weights is Weights.SLICED else 0)


def test_gathers_are_in_order_of_use_and_reductions_in_order_of_completion() -> None:
    """Forward uses a chunk's buckets in the reverse order of backward; an updated bucket is not freed."""
    buckets = [Bucket(number, (number // 2,), Weights.UPDATED, Reduced.STEP) for number in (1, 0, 3, 2)]
    plan = lower_with(make_schedule("interleaved", 1, 1), buckets)
    assert computing(plan, 0) == "g0 g1 0F0[g2 g3] 1F0 1B0[r3 r2] 0B0[r1 r0]"
    sliced = [Bucket(b.index, b.chunks, Weights.SLICED, Reduced.MICROBATCH) for b in buckets]
    plan = lower_with(make_schedule("interleaved", 1, 1), sliced, Residency.USE)
    assert computing(plan, 0) == "g0 g1 0F0[g2 g3 f1 f0] 1F0[f3 f2] g3 g2 1B0[g1 g0 r3 r2 f3 f2] 0B0[r1 r0 f1 f0]"


def test_a_bucket_of_two_chunks_is_gathered_for_both() -> None:
    shared = [
        Bucket(0, (0,), Weights.SLICED, Reduced.MICROBATCH),
        Bucket(1, (0, 1), Weights.SLICED, Reduced.MICROBATCH),
    ]
    kept, used = (lower_with(make_schedule("interleaved", 1, 1), shared, residency) for residency in Residency)
    assert computing(kept, 0) == "g1 g0 0F0 1F0 1B0[r1] 0B0[r0 r1 f0 f1]"
    assert computing(used, 0) == "g1 g0 0F0[f0 f1] g1 1F0[f1] g1 1B0[g0 r1 f1] g1 0B0[r0 r1 f0 f1]"
    assert "w[r1" in format_actions(kept.actions[0]).partition("1B0[r1]")[2].partition("0B0")[0]


def test_a_forward_plan_gathers_and_never_reduces() -> None:
    for weights, residency, expected in (
        (Weights.UPDATED, Residency.USE, "g1 1F0 1F1"),
        (Weights.SLICED, Residency.STEP, "g1 1F0 1F1[f1]"),
        (Weights.SLICED, Residency.USE, "g1 1F0[f1] g1 1F1[f1]"),
    ):
        plan = sharded("forward_only", 2, 2, residency, weights)
        verify(plan)
        assert computing(plan, 1) == expected


@st.composite
def random_plans(draw: st.DrawFn) -> Plan:
    """Any schedule, each chunk with up to two buckets of any kind, and one of both ends where a rank holds both."""
    schedule = draw(schedules(max_chunks=2))
    ranks, kinds = schedule.ranks, st.tuples(st.sampled_from(Weights), st.sampled_from(Reduced))
    chunks = [(chunk,) for chunk in range(len(ranks)) for _ in range(draw(st.integers(0, 2)))]
    if len(ranks) > 1 and ranks[0] == ranks[-1] and draw(st.booleans()):
        chunks.append((0, len(ranks) - 1))
    buckets = [Bucket(index, of, *draw(kinds)) for index, of in enumerate(chunks)]
    training = draw(st.booleans())
    if not training:
        forwards = tuple(tuple(a for a in actions if a.kind is Kind.F) for actions in schedule.compute)
        schedule = Schedule(schedule.name, ranks, forwards)
    return lower_with(schedule, buckets, draw(st.sampled_from(Residency)), training)


def check(plan: Plan) -> None:
    verify(plan)
    assert why_illegal(plan) is None
    assert parse_plan(plan.text()) == plan


@settings(max_examples=100)
@given(random_plans())
def test_any_order_of_compute_lowers_to_a_plan_that_verifies(plan: Plan) -> None:
    check(plan)


@pytest.mark.slow
@settings(max_examples=10_000)
@given(random_plans())
def test_ten_thousand_random_plans_verify(plan: Plan) -> None:
    check(plan)


@pytest.mark.parametrize("name", SCHEDULES)
def test_kept_weights_cost_no_memory_at_the_peak(name: str) -> None:
    """Gathered one chunk ahead, a rank never holds more than all its chunks; for one use it holds two at most."""
    for p, m, v in ((2, 4, 2), (4, 8, 4)):
        for residency in Residency:
            plan = sharded(name, p, m, residency, num_chunks=v)
            sizes = dict.fromkeys(range(len(plan.chunks)), 1.0)
            for rank in range(p):
                num_chunks = len(plan.chunks_of(rank))
                most = num_chunks if residency is Residency.STEP else min(num_chunks, 2)
                assert max(held_bytes(plan, rank, sizes)) == most
