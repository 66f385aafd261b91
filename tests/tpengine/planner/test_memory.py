"""Rung: pure. Bytes over time: by hand, and against the peak of live activations of every schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpengine.plan import SCHEDULES, Chunk, Kind, Plan, TensorSpec, parse_actions
from tpengine.plan.actions import COMPUTE
from tpengine.planner import ChunkBytes, Costs, simulate
from tpengine.planner.costs import unit_costs
from tpengine.planner.memory import memory_curve, slot_bytes

# 100 bytes.
BOUNDARY = TensorSpec((25,), "float32")


def plan_of(*lists: str, ranks: tuple[int, ...] = (0, 1), training: bool = True) -> Plan:
    last = len(ranks) - 1
    chunks = tuple(
        Chunk(rank, (chunk, chunk + 1), BOUNDARY if chunk else None, BOUNDARY if chunk < last else None)
        for chunk, rank in enumerate(ranks)
    )
    return Plan("by hand", 2, last + 1, chunks, (), (), tuple(map(parse_actions, lists)), training)


def costs_of(plan: Plan, size: ChunkBytes, resident: float = 0.0) -> Costs:
    units = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}
    return Costs(
        {(kind, chunk): unit for kind, unit in units.items() for chunk in range(len(plan.chunks))},
        latency=0.5,
        activations=dict.fromkeys(range(len(plan.chunks)), size),
        resident=(resident,) * plan.num_ranks,
    )


def test_a_backward_frees_what_its_forward_saved() -> None:
    """Rank 0: saved 10 from 0, F's output from 1 until its send is waited for; a slot of 100 for the gradient."""
    plan = plan_of(
        "0F0 0SEND_F0 0RECV_B0 w[0SEND_F0] w[0RECV_B0] 0B0",
        "1RECV_F0 w[1RECV_F0] 1F0 1B0 1SEND_B0 w[1SEND_B0]",
    )
    first, second = simulate(
        plan, costs_of(plan, ChunkBytes(saved=10, working=dict.fromkeys(COMPUTE, 3)), resident=1000.0)
    ).ranks
    assert first.memory == ((0.0, 1113.0), (1.0, 1210.0), (1.5, 1110.0), (5.0, 1113.0), (7.0, 1100.0))
    assert first.peak_bytes == 1210.0
    # 1F0 from 1.5 to 2.5, 1B0 to 4.5, the gradient until 5.
    assert second.memory == ((0.0, 1100.0), (1.5, 1113.0), (4.5, 1200.0), (5.0, 1100.0))


def test_halves_of_a_backward_free_one_after_the_other() -> None:
    plan = plan_of("0F0 0F1 0I0 0I1 0W0 0W1", ranks=(0,))
    (rank,) = simulate(plan, costs_of(plan, ChunkBytes(saved=10, deferred=4, working=dict.fromkeys(COMPUTE, 1)))).ranks
    assert rank.memory == ((0.0, 11.0), (1.0, 21.0), (3.0, 15.0), (4.0, 9.0), (5.0, 5.0), (6.0, 0.0))


def test_a_whole_backward_defers_nothing() -> None:
    plan = plan_of("0F0 0B0", ranks=(0,))
    (rank,) = simulate(plan, costs_of(plan, ChunkBytes(saved=10, deferred=4))).ranks
    assert rank.memory == ((0.0, 10.0), (3.0, 0.0))


def test_between_chunks_of_one_rank_an_output_lives_until_the_next_begins() -> None:
    plan = plan_of("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1", ranks=(0, 0))
    (rank,) = simulate(plan, costs_of(plan, ChunkBytes(saved=1))).ranks
    # Outputs of chunk 0: from 1 to 2 and from 2 to 3; gradients of chunk 1: from 6 to 8 and from 8 to 10.
    assert rank.memory == (
        (0.0, 1.0), (1.0, 102.0), (2.0, 103.0), (3.0, 4.0), (6.0, 103.0), (8.0, 102.0), (10.0, 1.0), (12.0, 0.0),
    )  # fmt: skip


def test_forward_only_saves_nothing() -> None:
    plan = plan_of("0F0 0SEND_F0 w[0SEND_F0]", "1RECV_F0 w[1RECV_F0] 1F0", training=False)
    first, second = simulate(plan, costs_of(plan, ChunkBytes(saved=10, working=dict.fromkeys(COMPUTE, 3)))).ranks
    assert first.memory == ((0.0, 3.0), (1.0, 100.0), (1.5, 0.0))
    assert second.memory == ((0.0, 100.0), (1.5, 103.0), (2.5, 100.0))


def test_slots_are_as_large_as_the_largest_tensor() -> None:
    plan = plan_of("0F0 0F1 0SEND_F0 0SEND_F1", "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1")
    assert (slot_bytes(plan, 0), slot_bytes(plan, 1)) == (0, 200)
    plan = plan_of("0F0", "1RECV_F0 3RECV_F0 1F0 3F0 3B0 1B0", ranks=(0, 1, 0, 1))
    for wide in (1, 3):
        chunks = list(plan.chunks)
        chunks[wide] = replace(chunks[wide], input=TensorSpec((25,), "float64"))
        assert slot_bytes(replace(plan, chunks=tuple(chunks)), 1) == 2 * 200


def test_without_bytes_there_is_no_curve() -> None:
    plan = plan_of("0F0 0B0", ranks=(0,))
    assert simulate(plan).ranks[0].memory == ()
    assert simulate(plan, replace(unit_costs(plan), resident=(7.0,))).ranks[0].memory == ((0.0, 7.0),)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 12), st.integers(1, 3))
def test_the_peak_is_that_of_live_activations(
    build_plan: Callable[..., Plan], name: str, p: int, m: int, v: int
) -> None:
    """Where boundary tensors are empty and W frees what I saved, bytes are live activations in another unit."""
    plan = build_plan(name, p, m, num_chunks=v)
    empty = {
        side: tuple(getattr(chunk, side) and TensorSpec((0,), "float32") for chunk in plan.chunks)
        for side in ("input", "output")
    }
    chunks = tuple(
        replace(chunk, input=before, output=after)
        for chunk, before, after in zip(plan.chunks, empty["input"], empty["output"], strict=True)
    )
    plan = replace(plan, chunks=chunks)
    num_chunks = Counter(chunk.rank for chunk in chunks)
    activations = {i: ChunkBytes(saved=12.0, deferred=12.0) for i in range(len(chunks))}
    timeline = simulate(plan, replace(unit_costs(plan), activations=activations, resident=(5.0,) * p))
    peaks = [5.0 + 12.0 * num_chunks[rank] * live for rank, live in enumerate(timeline.peak_live_activations)]
    assert [rank.peak_bytes for rank in timeline.ranks] == pytest.approx(peaks)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 12), st.integers(1, 3))
def test_a_step_leaves_what_it_found(build_plan: Callable[..., Plan], name: str, p: int, m: int, v: int) -> None:
    plan = build_plan(name, p, m, num_chunks=v)
    activations = {
        i: ChunkBytes(saved=7.0, deferred=5.0, working=dict.fromkeys(COMPUTE, 3.0)) for i in range(len(plan.chunks))
    }
    costs = replace(unit_costs(plan), activations=activations, latency=0.25, resident=(11.0,) * p)
    for number, rank in enumerate(simulate(plan, costs).ranks):
        floor = 11.0 + slot_bytes(plan, number)
        assert rank.memory[-1][1] == floor == min(held for _, held in rank.memory)
        times = [time for time, _ in rank.memory]
        assert times == sorted(set(times)) and times[-1] <= rank.end
        # The curve follows from the times alone, so a measured timeline has one too.
        assert memory_curve(plan, number, replace(rank, memory=()), costs) == rank.memory
