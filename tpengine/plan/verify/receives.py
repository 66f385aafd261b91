"""Receives: no slot is written while the tensor in it is still needed.

Live ranges are found by replaying the list, not by looking ahead as the assignment does (slots.py), so that both cannot
share a mistake.
"""

from __future__ import annotations

from collections import defaultdict

from tpengine.plan.actions import COMPUTE, RECEIVES, Kind
from tpengine.plan.lower.slots import ReceiveSlots, receive_slots
from tpengine.plan.plan import Plan
from tpengine.plan.verify.fault import fault

_Piece = tuple[int, int]
_Place = tuple[Kind, int]


def check_receives(plan: Plan) -> None:
    """Check the slots that `receive_slots` assigns on every rank."""
    for rank, actions in enumerate(plan.actions):
        check_slots(plan, rank, receive_slots(actions))


def check_slots(plan: Plan, rank: int, slots: ReceiveSlots) -> None:
    """Replay one rank's list over its slots."""
    # The micro-batch that each slot holds, and the slots of each micro-batch.
    holder: dict[_Place, _Piece] = {}
    places: dict[_Piece, list[_Place]] = defaultdict(list)
    done: dict[_Piece, set[Kind]] = defaultdict(set)
    for position, action in enumerate(plan.actions[rank]):
        if action.kind in RECEIVES:
            slot = slots.slot(action)
            if (action.kind, slot) in holder:
                chunk, microbatch = holder[action.kind, slot]
                values = f"{action} writes slot {slot} of chunk {chunk}, micro-batch {microbatch}"
                raise fault(plan, "a receive slot is free when written", values, rank, position)
            holder[action.kind, slot] = action.piece
            places[action.piece].append((action.kind, slot))
        if action.kind in COMPUTE:
            done[action.piece].add(action.kind)
            if _is_finished(done[action.piece], plan.training):
                for place in places.pop(action.piece, ()):
                    del holder[place]


def _is_finished(done: set[Kind], training: bool) -> bool:
    return Kind.F in done if not training else Kind.B in done or {Kind.I, Kind.W} <= done
