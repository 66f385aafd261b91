"""Transfers: add each boundary tensor's send and receive to both ranks' lists, with early receives.

All compute actions of all ranks are sorted into one global order, by the time at which they end on the unit clock.
Behind each comes the transfer of what it has produced. A rank's list is the part of this order that concerns the rank.
So a send is posted as soon as its tensor exists. A receive is posted before the compute action that its rank is running
at that time, not after it: that action hides the link's latency, even if the rank is a little late.

The decision a reader will question is the order of actions that end at the same time, because the transfer of the first
one is posted early by the rank of the second one, and not the other way round. Input gradients come first, from the
last chunk to the first; then forwards, from the first chunk to the last; weight halves, which send nothing, come last.
So both follow the direction in which their tensors travel. Latency makes each rank lag behind the rank it receives
from; with this order the receive is still posted before the tensor arrives.

What is gained where each direction of a pair of ranks is a channel of its own (shared memory, gloo): with a latency of
a tenth of a forward, gpipe, zb-h1 and zbv (m > p) end when they would end with all receives posted before the first
action. 1f1b loses up to a quarter more than that. interleaved may lose a tenth of the step where all receives posted
first would lose some per cent, because in its ring some rank always posts just in time (p to 8, m to 32, v to 4).
NCCL runs all transfers of a rank one after another in one communicator. With it gpipe and interleaved gain, and zb-h1
loses, because its early receives hold up sends: some per cent of a step, never the plan itself. There each direction
needs a communicator of its own, which does not exist yet.

No plan that is built this way can deadlock.
    Blocking rendezvous: consider the first action in the order that is not done. Its ranks have done everything before
    it, so all of them have reached it. A compute action only needs results that ended before it and have been
    transferred since; a transfer only needs both ranks. So the action runs, and by induction all do.
    In-order channels, one per pair or one for all transfers of a rank: consider the first transfer in the order that
    has not run. All before it have run, so it is next on its channels. A rank that has not posted it would have to be
    blocked in a wait for a transfer that it posted before, hence for an earlier one, but that one has run. So no rank
    is blocked for ever.
Hence no two transfers have to be posted together, as is needed where ranks exchange tensors in no common order.

Memory cost of early receives: a buffer is held from the time it is posted (slots.py assigns buffers). Compared with
receives posted where they are read, that is at most one more activation and one more gradient per chunk, except in the
cool-down of interleaved, where up to ten gradients wait on the last rank (p to 8, m to 20). Late receives would instead
keep the output alive on the sender, and a blocking sender would stall.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tpengine.plan.actions import INPUT_GRADIENT, Action, Kind, counterpart
from tpengine.plan.clock import clock, whole_unit_durations
from tpengine.plan.schedules import ComputeLists, Schedule
from tpengine.plan.timeline import Span

# A place in the global order: the time, then the order among actions that end at this time.
_Place = tuple[float, int, int]


def add_transfers(schedule: Schedule) -> ComputeLists:
    """Insert sends and receives into the lists of compute actions.

    Chunks that share a rank need no transfer.

    Args: schedule: compute actions and the chunks' ranks.
    Returns: one list per rank.
    Raises: ValueError: the lists cannot finish.
    """
    timeline = clock(schedule.compute, whole_unit_durations(schedule.ranks))
    # By rank: its compute actions, and behind each the transfer of what it has produced.
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
    """Return the place of an action in the global order; no two actions on one chunk have the same place."""
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
