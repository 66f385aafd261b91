"""Receives: no slot is written while the tensor in it is still needed.

Live ranges are found by replaying the list, not by looking ahead as the assignment does (slots.py), so that a
mistake in one is not a mistake in the other.
"""

from __future__ import annotations

from collections import defaultdict

from tpengine.plan.actions import COMPUTE, RECEIVES, Kind
from tpengine.plan.checks.fault import fault
from tpengine.plan.plan import Plan
from tpengine.plan.slots import ReceiveSlots, receive_slots

_Piece = tuple[int, int]


def check_receives(plan: Plan) -> None:
    """Check the slots that `receive_slots` assigns on every rank."""
    for rank, actions in enumerate(plan.actions):
        check_slots(plan, rank, receive_slots(actions))


def check_slots(plan: Plan, rank: int, slots: ReceiveSlots) -> None:
    """Replay one rank's list over its slots."""
    holder: dict[tuple[Kind, int], _Piece] = {}
    done: dict[_Piece, set[Kind]] = defaultdict(set)
    for position, action in enumerate(plan.actions[rank]):
        for receive in action.transfers:
            if receive.kind not in RECEIVES:
                continue
            slot = slots.slot(receive)
            chunk, microbatch = holder.setdefault((receive.kind, slot), receive.piece)
            if (chunk, microbatch) != receive.piece:
                values = f"{receive} writes slot {slot} of chunk {chunk}, micro-batch {microbatch}"
                raise fault(plan, "a receive slot is free when written", values, rank, position)
        if action.kind in COMPUTE:
            done[action.piece].add(action.kind)
            if _is_finished(done[action.piece], plan.training):
                holder = {place: piece for place, piece in holder.items() if piece != action.piece}


def _is_finished(done: set[Kind], training: bool) -> bool:
    return Kind.F in done if not training else Kind.B in done or {Kind.I, Kind.W} <= done
