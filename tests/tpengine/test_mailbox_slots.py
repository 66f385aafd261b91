"""Rung: pure. A mailbox of `num_slots_for` messages a queue never makes a send of a verified plan wait.

The transport that CPU ranks really use is bounded: a send copies into a queue of so many messages, and a receive is
taken where it is waited for. Played here with the plan's own number of slots, and with fewer, where it must fail.
"""

from __future__ import annotations

from collections import defaultdict, deque

import pytest

from tpengine.plan import SCHEDULES, Action, Chunk, Kind, Plan, Schedule, TensorSpec, forward_only, lower, make_schedule
from tpengine.plan.actions import RECEIVES
from tpengine.transfers import num_slots_for

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
            return [(sub, True) for sub in action.subs if sub.kind in RECEIVES]
        return [(transfer, False) for transfer in action.transfers]

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


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_send_waits(name: str) -> None:
    for p in (1, 2, 3, 4, 8):
        for m in (1, 2, 5, 8, 24):
            for v in (1, 2, 4) if name == "interleaved" else (2,):
                schedule = make_schedule(name, p, m, v)
                training = plan_of(schedule, training=True)
                forward = plan_of(forward_only(schedule.ranks, 4 * m), training=False)
                assert finishes(training, num_slots_for(training)), (p, m, v)
                assert finishes(forward, num_slots_for(forward)), (p, m, v)


def test_the_game_can_be_lost() -> None:
    """One slot is too few for interleaved, whose ranks send to each other around the ring."""
    plan = plan_of(make_schedule("interleaved", 2, 8, 2), training=True)
    assert num_slots_for(plan) > 1 and not finishes(plan, 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_forward_pass_keeps_no_more_alive_with_more_micro_batches(name: str) -> None:
    for p in (1, 2, 4, 8):
        ranks = make_schedule(name, p, 8).ranks
        few, many = (num_slots_for(plan_of(forward_only(ranks, m), training=False)) for m in (2 * len(ranks), 256))
        assert few == many <= 4
