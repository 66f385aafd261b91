"""Transfers: each boundary tensor's send and receive enter both ranks' lists, receives early.

All compute actions of all ranks stand in one global order, by the time at which they end on the unit clock. Each is
followed there by the transfer of what it has made, and every list is the part of that order that touches its rank. So a
send is posted as soon as its tensor exists; and a receive stands before the compute action that its rank has under way
at that time, not behind it: a link's latency is hidden by that action, also if the rank is a little late.

The decision a reader will question: of actions that end together, which comes first. The transfer of the first is
posted early by the rank of the other, and not the other way round. Input gradients come first, from the last chunk to
the first, then forwards from the first to the last, each in the direction in which tensors flow; weight halves, which
send nothing, come last. So in a pipeline whose latency has made each rank lag behind the one it receives from, the
receive is there before the tensor.

What is gained, where each direction of a pair of ranks is a channel of its own (shared memory, gloo): with a latency of
a tenth of a forward, gpipe, zb-h1 and zbv (m > p) end when they would if all receives were posted before the first
action. 1f1b loses up to a quarter more than that. Interleaved may lose a tenth of the step where that would lose some
per cent: around its ring some rank always posts just in time (p to 8, m to 32, v to 4). A communicator that runs all
transfers of a rank one after another, as NCCL's does, gains with gpipe and interleaved and loses with zb-h1, whose
early receives hold up sends: there each direction needs a communicator of its own, which is not there yet.

No plan made so can deadlock.
    Blocking rendezvous: of all that is not yet done take what comes first in the order. Its ranks have done everything
    before it, so they all stand at it; a compute action needs only what ended before it and has come since, a transfer
    only that both ranks stand at it. So it is done, and so on to the end.
    In-order channels, one a pair or one for all transfers of a rank: take the first transfer in the order that has not
    run. All before it have, so it is next on its channels. A rank that has not posted it stands in a wait for one that
    it posted before, hence for an earlier one, which has run. So nobody stands for ever.
Hence no two transfers have to be posted together, as one would to exchange tensors in ranks that post at will.

What early receives cost: a buffer is held from its post on (slots.py assigns them). Against receives posted where they
are read, that is one activation a chunk at most, and one gradient, but in interleaved's cool-down, where up to ten
gradients wait on the last rank (p to 8, m to 20). A late receive would move the buffer to the sender, whose output
could not be let go, and a blocking sender would stand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tpengine.plan.actions import INPUT_GRADIENT, Action, Kind, counterpart
from tpengine.plan.clock import clock, whole_unit_durations
from tpengine.plan.schedules import ComputeLists, Schedule
from tpengine.plan.timeline import Span

# The time, and what comes first at it.
_Place = tuple[float, int, int]


def add_transfers(schedule: Schedule) -> ComputeLists:
    """Insert sends and receives into the lists of compute actions.

    Chunks that share a rank need no transfer.

    Args: schedule: compute actions and the chunks' ranks.
    Returns: one list a rank.
    Raises: ValueError: the lists cannot finish.
    """
    timeline = clock(schedule.compute, whole_unit_durations(schedule.ranks))
    # By rank: compute actions, and behind each its transfer.
    placed: defaultdict[int, list[tuple[_Place, bool, Action]]] = defaultdict(list)
    for own, rank in enumerate(timeline.ranks):
        for span in rank.compute:
            place, send = _place(span), _send(span.action, schedule.ranks)
            placed[own].append((place, False, span.action))
            if send is not None:
                receive = counterpart(send)
                placed[own].append((place, True, send))
                placed[schedule.ranks[receive.piece[0]]].append((place, True, receive))
    return tuple(
        tuple(action for _, _, action in sorted(placed[own], key=lambda entry: entry[:2]))
        for own in range(len(timeline.ranks))
    )


def _place(span: Span) -> _Place:
    """Where an action stands in the order of all ranks' actions; no two on one chunk stand at the same place."""
    chunk, _ = span.action.piece
    if span.action.kind in INPUT_GRADIENT:
        return span.end, 0, -chunk
    return span.end, 1 if span.action.kind is Kind.F else 2, chunk


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
