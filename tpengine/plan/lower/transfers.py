"""Transfers: each boundary tensor's send and receive enter both ranks' lists where the tensor is produced.

The decision a reader will question: a receive is posted when its tensor is produced on the unit clock (early), not
where the receiver needs it. So a transfer, with those that share its instant and its two ranks, is one event of one
global order: by time, then by pair of ranks; and every list is the part of that order that touches its rank, with the
compute actions that start at an instant after the events of that instant.

No plan made so can deadlock.
    Blocking rendezvous: of all that is not yet done take what comes first in the order. Its ranks have done everything
    before it, so they all stand at it; a compute action needs only what events before it have brought, an event only
    that both ranks stand at it. So it is done, and so on to the end.
    One in-order channel a pair: both ranks of a pair post the same events in the same order, so an event is delivered
    once both have posted it. A rank waits only for events that it has posted. If it stands in a wait for event e, its
    peer has not posted e, hence stands in a wait for an event before e. The order has a first event: nobody stands.

The transfers of one event are posted together (EXCHANGE). A rank makes one tensor at a time, so there are at most two,
one each way: taken apart they would have to run one after the other on a link that carries both directions at once, and
in opposite order on the two sides they would deadlock. Transfers with different peers stay apart: to post them together
would make each wait for the slower one.

What early receives cost: a buffer is held from its post on (slots.py assigns them). Against receives posted where they
are read, that is at most one activation a chunk: one on 1F1B, two on interleaved (v=2) and zbv, none on GPipe and
zb-h1; and of gradients none but in interleaved's cool-down, where up to six wait on the last rank (p to 8, m to 20). A
late receive would move the buffer to the sender, whose output could not be let go, and a blocking sender would stand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from tpengine.plan.actions import INPUT_GRADIENT, Action, Kind, counterpart
from tpengine.plan.clock import clock, whole_unit_durations
from tpengine.plan.schedules import ComputeLists, Schedule
from tpengine.plan.timeline import RankTimeline, Timeline

# When, and between which two ranks (the lower one first).
_Event = tuple[float, tuple[int, int]]
_KIND_ORDER = tuple(Kind)


def add_transfers(schedule: Schedule) -> ComputeLists:
    """Insert sends and receives into the lists of compute actions.

    A rank that is busy at an event's time gets it after the action under way. Chunks that share a rank need no
    transfer.

    Args: schedule: compute actions and the chunks' ranks.
    Returns: one list a rank.
    Raises: ValueError: the lists cannot finish.
    """
    timeline = clock(schedule.compute, whole_unit_durations(schedule.ranks))
    events = _events(timeline, schedule.ranks)
    return tuple(_merge(rank, events[number]) for number, rank in enumerate(timeline.ranks))


def _events(timeline: Timeline, ranks: Sequence[int]) -> Mapping[int, Mapping[_Event, list[Action]]]:
    """Return, by rank, the transfers that it posts in each event."""
    events: defaultdict[int, defaultdict[_Event, list[Action]]] = defaultdict(lambda: defaultdict(list))
    for own, rank in enumerate(timeline.ranks):
        for span in rank.compute:
            send = _send(span.action, ranks)
            if send is not None:
                receive = counterpart(send)
                peer = ranks[receive.piece[0]]
                event = (span.end, (min(own, peer), max(own, peer)))
                events[own][event].append(send)
                events[peer][event].append(receive)
    return events


def _send(action: Action, ranks: Sequence[int]) -> Action | None:
    """Return the send of the tensor that a compute action produces, if it leaves the rank."""
    chunk, microbatch = action.piece
    if action.kind is Kind.F:
        neighbour, kind = chunk + 1, Kind.SEND_F
    elif action.kind in INPUT_GRADIENT:
        neighbour, kind = chunk - 1, Kind.SEND_B
    else:
        return None
    if not 0 <= neighbour < len(ranks) or ranks[neighbour] == ranks[chunk]:
        return None
    return Action(kind, chunk, microbatch)


def _merge(rank: RankTimeline, events: Mapping[_Event, list[Action]]) -> tuple[Action, ...]:
    """Return one rank's compute actions and events in the global order."""
    merged: list[Action] = []
    pending = sorted(events.items(), reverse=True)
    for span in rank.compute:
        while pending and pending[-1][0][0] <= span.start:
            merged.append(_fuse(pending.pop()[1]))
        merged.append(span.action)
    merged += [_fuse(transfers) for _, transfers in reversed(pending)]
    return tuple(merged)


def _fuse(transfers: Sequence[Action]) -> Action:
    """Return one action that posts the transfers of an event."""
    if len(transfers) == 1:
        return transfers[0]
    ordered = sorted(transfers, key=lambda transfer: (_KIND_ORDER.index(transfer.kind), transfer.piece))
    return Action(Kind.EXCHANGE, subs=tuple(ordered))
