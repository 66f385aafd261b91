"""Rung: pure. Lowered lists, word for word where small, by their properties where large."""

from __future__ import annotations

from collections.abc import Callable

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
    TensorSpec,
    format_actions,
    lower,
    parse_actions,
    verify,
)

BOUNDARY = TensorSpec((4, 2), "float32")

BuildPlan = Callable[..., Plan]


def without_waits(plan: Plan, rank: int) -> str:
    return format_actions(action for action in plan.actions[rank] if action.kind is not Kind.WAIT)


def test_two_ranks_word_for_word(build_plan: BuildPlan) -> None:
    plan = build_plan("1f1b", 2, 2)
    assert [format_actions(actions) for actions in plan.actions] == [
        "0F0 0SEND_F0 0F1 w[0SEND_F0] 0SEND_F1 0RECV_B0 w[0RECV_B0] 0B0 0RECV_B1 w[0SEND_F1 0RECV_B1] "
        "0B1[r1 r0] w[r1 r0] t0 CLIP STEP",
        "1RECV_F0 w[1RECV_F0] 1F0 1RECV_F1 1B0 1SEND_B0 w[1RECV_F1] 1F1 1B1[r3 r2] w[1SEND_B0] 1SEND_B1 "
        "w[r3 r2 1SEND_B1] t0 CLIP STEP",
    ]


def test_plan_text_is_complete(build_plan: BuildPlan) -> None:
    lines = build_plan("forward_only", 2, 1).text().splitlines()
    assert lines == [
        "plan forward_only forward microbatches 1 layers 3",
        "chunk 0 rank 0 layers 0:2 input none output float32[128,64]",
        "chunk 1 rank 1 layers 2:3 input float32[128,64] output none",
        "bucket 1 chunk 0",
        "bucket 0 chunk 0",
        "bucket 3 chunk 1",
        "bucket 2 chunk 1",
        "tie 0 chunks 0 1",
        "rank 0: 0F0 0SEND_F0 w[0SEND_F0]",
        "rank 1: 1RECV_F0 w[1RECV_F0] 1F0",
    ]


def test_digest_follows_the_text(build_plan: BuildPlan) -> None:
    assert build_plan("1f1b", 4, 4).digest() == build_plan("1f1b", 4, 4).digest()
    digests = {build_plan(name, 4, m).digest() for name in SCHEDULES for m in (4, 5)}
    assert len(digests) == 4


def test_steady_state_exchanges_between_neighbours(build_plan: BuildPlan) -> None:
    plan = build_plan("1f1b", 4, 12)
    for rank in (0, 1, 2):
        text = format_actions(plan.actions[rank])
        neighbour = format_actions(plan.actions[rank + 1])
        for microbatch in range(4, 12):
            back = microbatch - (3 - rank)
            assert f"X[{rank}SEND_F{microbatch} {rank}RECV_B{back}]" in text
            assert f"X[{rank + 1}RECV_F{microbatch} {rank + 1}SEND_B{back}]" in neighbour


def test_one_rank_needs_no_transfers(build_plan: BuildPlan) -> None:
    plan = build_plan("1f1b", 1, 2)
    assert format_actions(plan.actions[0]) == "0F0 0B0 0F1 0B1[r1 r0] w[r1 r0] CLIP STEP"


def test_chunks_on_the_same_rank_need_no_transfer() -> None:
    chunks = [
        Chunk(0, (0, 1), None, BOUNDARY),
        Chunk(0, (1, 2), BOUNDARY, BOUNDARY),
        Chunk(1, (2, 3), BOUNDARY, None),
    ]
    compute = (parse_actions("0F0 1F0 1B0 0B0"), parse_actions("2F0 2B0"))
    plan = lower("two", compute, chunks, [Bucket(0, 1)], [], 1, 3, training=True)
    verify(plan)
    assert without_waits(plan, 0) == "0F0 1F0 1SEND_F0 1RECV_B0 1B0[r0] 0B0 CLIP STEP"


def test_split_backward_reduces_in_its_last_half() -> None:
    chunks = [Chunk(0, (0, 1), None, BOUNDARY), Chunk(1, (1, 2), BOUNDARY, None)]
    compute = (parse_actions("0F0 0F1 0I0 0W0 0I1 0W1"), parse_actions("1F0 1I0 1F1 1I1 1W0 1W1"))
    plan = lower("split", compute, chunks, [Bucket(0, 0), Bucket(1, 1)], [], 2, 2, training=True)
    verify(plan)
    assert "0I1 0W1[r0]" in without_waits(plan, 0)
    assert "1I1 1SEND_B1 1W0 1W1[r1]" in without_waits(plan, 1)


def test_lists_and_chunks_must_agree() -> None:
    with pytest.raises(ValueError, match=r"lists use chunks \[0, 1\], there are 1"):
        lower("1f1b", SCHEDULES["1f1b"](2, 1), [Chunk(0, (0, 1), None, None)], [], [], 1, 1, training=True)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.sampled_from([*sorted(SCHEDULES), "forward_only"]), st.integers(1, 16), st.integers(1, 64))
def test_every_plan_verifies(build_plan: BuildPlan, name: str, num_ranks: int, num_microbatches: int) -> None:
    plan = build_plan(name, num_ranks, num_microbatches)
    verify(plan)
    for actions in plan.actions:
        assert parse_actions(format_actions(actions)) == actions


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.data())
def test_any_order_of_compute_lowers_to_a_plan_that_verifies(data: st.DataObject) -> None:
    """Random lists: p ranks with v chunks each, whole or split backwards, in any order that can finish."""
    num_ranks, num_chunks_each = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    num_microbatches, is_split = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    num_chunks = num_ranks * num_chunks_each
    chunks = [
        Chunk(
            chunk % num_ranks,
            (chunk, chunk + 1),
            BOUNDARY if chunk else None,
            BOUNDARY if chunk < num_chunks - 1 else None,
        )
        for chunk in range(num_chunks)
    ]
    # One random order over all ranks in which every action comes after its inputs; each rank takes its part.
    backward = (Kind.I, Kind.W) if is_split else (Kind.B,)
    lists: list[list[Action]] = [[] for _ in range(num_ranks)]
    todo = [[Action(Kind.F, c, i) for c in range(num_chunks)] for i in range(num_microbatches)]
    for i, chain in enumerate(todo):
        chain += [Action(kind, c, i) for c in reversed(range(num_chunks)) for kind in backward]
    while any(todo):
        chain = data.draw(st.sampled_from([chain for chain in todo if chain]))
        action = chain.pop(0)
        lists[action.piece[0] % num_ranks].append(action)
    compute = tuple(map(tuple, lists))
    buckets = [Bucket(chunk, chunk) for chunk in range(num_chunks)]
    verify(lower("random", compute, chunks, buckets, [], num_microbatches, num_chunks, training=True))
