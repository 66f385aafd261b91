"""Receive slots: which buffer each receive of a rank writes. The list alone decides it, before the step.

Two receives may share a slot when the first tensor is dead before the second receive is posted. Live ranges are
intervals of list positions. Colouring them greedily in the order of their starts needs as many slots as are live at
once, which is the fewest possible: p-r activations on rank r of 1F1B, plus one where a receive is posted early, instead
of one per micro-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tpengine.plan.actions import COMPUTE, Action, Kind


@dataclass(frozen=True)
class ReceiveSlots:
    """The slot of every receive of one rank.

    Args:
        forward: slot by (chunk, microbatch) of RECV_F; `backward` the same of RECV_B.
        num_forward: number of slots for activations; `num_backward` for gradients. Where a rank holds chunks
            of different boundary shapes, a slot must fit the largest.
    """

    forward: Mapping[tuple[int, int], int]
    backward: Mapping[tuple[int, int], int]
    num_forward: int
    num_backward: int

    def slot(self, receive: Action) -> int:
        """Return the slot that a RECV_F or RECV_B writes."""
        return (self.forward if receive.kind is Kind.RECV_F else self.backward)[receive.piece]


def receive_slots(actions: Sequence[Action]) -> ReceiveSlots:
    """Assign a slot to every receive of one rank's list.

    A received tensor lives from its posting to the last compute action of its chunk and micro-batch: B, the later of I
    and W, or F where there is no backward.

    Args: actions: the rank's complete list.
    Returns: slots numbered from 0, separately for activations and gradients.
    """
    last_use = {action.piece: position for position, action in enumerate(actions) if action.kind in COMPUTE}
    forward = _colour(actions, Kind.RECV_F, last_use)
    backward = _colour(actions, Kind.RECV_B, last_use)
    return ReceiveSlots(
        MappingProxyType(forward), MappingProxyType(backward), _num_slots(forward), _num_slots(backward)
    )


def _colour(
    actions: Sequence[Action], kind: Kind, last_use: Mapping[tuple[int, int], int]
) -> dict[tuple[int, int], int]:
    """Give each receive of one kind the lowest free slot, so that no more slots exist than are live at once."""
    slots: dict[tuple[int, int], int] = {}
    free: list[int] = []
    # (last position, slot), the earliest end first.
    busy: list[tuple[int, int]] = []
    for position, action in enumerate(actions):
        if action.kind is not kind:
            continue
        while busy and busy[0][0] < position:
            heapq.heappush(free, heapq.heappop(busy)[1])
        # No slot is free, so all of them are in `busy`; the new one gets the next number.
        slot = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (last_use.get(action.piece, len(actions)), slot))
        slots[action.piece] = slot
    return slots


def _num_slots(slots: Mapping[tuple[int, int], int]) -> int:
    return 1 + max(slots.values(), default=-1)
