"""Rung: pure. Over a mailbox of `num_slots_for` messages a queue every verified plan finishes, on few messages.

The transport that CPU ranks really use is bounded: a send copies into a queue of so many messages, and a receive is
taken where it is waited for. Played here with the plan's own number of slots, and with fewer, where it must fail.
"""

from __future__ import annotations

from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from support.plans.random_schedules import schedules

from tpengine.pipeline.transfers import num_slots_for
from tpengine.plan import (
    SCHEDULES,
    Action,
    Chunk,
    Kind,
    Plan,
    Schedule,
    TensorSpec,
    forward_only,
    lower,
    make_schedule,
    receive_slots,
)
from tpengine.plan.actions import RECEIVES, TRANSFERS

TENSOR = TensorSpec((4, 4), "float32")


def plan_of(schedule: Schedule, *, training: bool) -> Plan:
    last = len(schedule.ranks) - 1
    chunks = [
        Chunk(rank, (i, i + 1), TENSOR if i else None, TENSOR if i < last else None)
        for i, rank in enumerate(schedule.ranks)
    ]
    return lower(schedule, chunks, (), (), schedule.num_microbatches, last + 1, training)


def finishes(plan: Plan, num_slots: int) -> bool:
    """Play the plan over queues of `num_slots` messages; False if a rank stands still for ever."""
    queued: defaultdict[tuple[int, int], int] = defaultdict(int)
    posted: list[defaultdict[int, deque[Action]]] = [defaultdict(deque) for _ in plan.actions]
    arrived: list[set[Action]] = [set() for _ in plan.actions]
    place = [(0, 0)] * plan.num_ranks

    def play(rank: int, transfer: Action, waits: bool) -> bool:
        peer = plan.peer(transfer)
        if waits and transfer.kind not in RECEIVES:
            return queued[rank, peer] < num_slots
        if waits:
            while transfer not in arrived[rank] and queued[peer, rank]:
                queued[peer, rank] -= 1
                arrived[rank].add(posted[rank][peer].popleft())
            return transfer in arrived[rank]
        if transfer.kind in RECEIVES:
            posted[rank][peer].append(transfer)
        elif queued[rank, peer] == num_slots:
            return False
        else:
            queued[rank, peer] += 1
        return True

    def steps(action: Action) -> list[tuple[Action, bool]]:
        if action.kind is Kind.WAIT:
            return [(sub, True) for sub in action.subs if sub.kind in TRANSFERS]
        return [(action, False)] if action.kind in TRANSFERS else []

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(plan.actions):
            while place[rank][0] < len(actions):
                number, sub = place[rank]
                todo = steps(actions[number])
                if sub == len(todo):
                    place[rank] = number + 1, 0
                elif play(rank, *todo[sub]):
                    place[rank] = number, sub + 1
                else:
                    break
                moved = True
    return all(number == len(actions) for (number, _), actions in zip(place, plan.actions, strict=True))


def most_received(plan: Plan) -> int:
    """The most received tensors that a rank keeps."""
    return max(slots.num_forward + slots.num_backward for slots in map(receive_slots, plan.actions))


# By default plans of up to 3 ranks and 8 micro-batches.
@pytest.mark.parametrize(
    ("ranks", "micro_batches"),
    [((1, 2, 3), (1, 2, 5, 8)), pytest.param((1, 2, 3, 4, 8), (1, 2, 5, 8, 24), marks=pytest.mark.slow)],
    ids=["few", "many"],
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_plan_finishes(name: str, ranks: tuple[int, ...], micro_batches: tuple[int, ...]) -> None:
    for p in ranks:
        for m in micro_batches:
            for v in (1, 2, 4) if name == "interleaved" else (2,):
                schedule = make_schedule(name, p, m, v)
                training = plan_of(schedule, training=True)
                forward = plan_of(forward_only(schedule.ranks, 4 * m), training=False)
                assert finishes(training, num_slots_for(training)), (p, m, v)
                assert finishes(forward, num_slots_for(forward)), (p, m, v)


@settings(derandomize=True, deadline=None, max_examples=75)
@given(schedules())
def test_any_order_of_compute_finishes(schedule: Schedule) -> None:
    plan = plan_of(schedule, training=True)
    assert finishes(plan, num_slots_for(plan))


@pytest.mark.parametrize("ranks", [(0, 1, 1, 1, 0), (0, 1, 2, 1), (0, 0, 1), (0, 1, 0, 0, 1)])
def test_a_forward_pass_over_chunks_that_lie_unevenly_finishes(ranks: tuple[int, ...]) -> None:
    """What its queue holds may grow with its micro-batches there: a mailbox is opened for as many as there are."""
    for m in (1, 4, 40):
        plan = plan_of(forward_only(ranks, m), training=False)
        assert finishes(plan, num_slots_for(plan)), m


def test_gpipe_needs_no_more_messages_for_more_micro_batches() -> None:
    assert num_slots_for(plan_of(make_schedule("gpipe", 4, 64), training=True)) == 3


def test_the_game_can_be_lost() -> None:
    """Room for one is too little for zbv, whose ranks have posted for two messages of each other at once."""
    plan = plan_of(make_schedule("zbv", 2, 8), training=True)
    assert num_slots_for(plan) == 3 and not finishes(plan, 1)


@pytest.mark.by_default("1f1b", "zb-h1")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "interleaved" else ()) for name in SCHEDULES]
)
def test_a_forward_pass_keeps_no_more_alive_with_more_micro_batches(name: str) -> None:
    for p in (1, 2, 4, 8):
        ranks = make_schedule(name, p, 8).ranks
        few, many = (most_received(plan_of(forward_only(ranks, m), training=False)) for m in (2 * len(ranks), 256))
        assert few == many <= 3
