"""Lowering: from compute lists to the complete plan, in passes that each add one thing to each rank's list.

    transfers    boundary tensors cross to the next rank the moment they exist
    reductions   gradient buckets start inside the last backward that fills them
    waits        what was started is waited for as late as its use allows
    ending       ties, clipping, the optimizer's step

The decision a reader will question: a transfer enters BOTH ranks' lists at the time its tensor is produced on
a unit-time clock, not where the receiver needs it. Every list is then a part of one global order, by time, in
which each transfer is a single event; so no rank can wait in a circle, even if every send and receive
blocked. The price on 1F1B is at most one receive buffer more than are in use (slots.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tpengine.plan.actions import (
    BACKWARD,
    COMPUTE,
    INPUT_GRADIENT,
    SENDS,
    TRANSFERS,
    Action,
    Kind,
    counterpart,
)
from tpengine.plan.plan import Bucket, Chunk, Plan, Tie
from tpengine.plan.schedules import ComputeLists
from tpengine.plan.simulate import Timeline, simulate

_KIND_ORDER = tuple(Kind)


def lower(
    schedule_name: str,
    compute: ComputeLists,
    chunks: Sequence[Chunk],
    buckets: Sequence[Bucket],
    ties: Sequence[Tie],
    num_microbatches: int,
    num_layers: int,
    training: bool,
) -> Plan:
    """Complete compute lists to a plan. It is not verified here: pass it to `verify`.

    Args:
        schedule_name: kept in the plan, for people.
        compute: one list of compute actions per pipeline rank, from a generator.
        chunks: the model's pieces in model order.
        buckets: reductions, those of a chunk in the order in which backward completes them.
        ties: parameters shared between ranks.
        num_microbatches: micro-batches of one data-parallel replica.
        num_layers: layers of the whole model.
        training: False leaves out reductions, ties, clipping and the step.
    Returns: the plan.
    Raises: ValueError: the compute lists cannot finish, or name a chunk that is not there.
    """
    _check_chunks(compute, chunks)
    lists = _add_transfers(simulate(compute), chunks)
    if training:
        lists = tuple(_add_reductions(actions, buckets) for actions in lists)
    lists = tuple(_add_waits(actions) for actions in lists)
    if training:
        lists = tuple(_add_ending(actions, rank, chunks, ties) for rank, actions in enumerate(lists))
    return Plan(
        schedule=schedule_name,
        num_microbatches=num_microbatches,
        num_layers=num_layers,
        chunks=tuple(chunks),
        buckets=tuple(buckets),
        ties=tuple(ties),
        actions=lists,
        training=training,
    )


def _check_chunks(compute: ComputeLists, chunks: Sequence[Chunk]) -> None:
    used = {action.piece[0] for actions in compute for action in actions}
    if used != set(range(len(chunks))):
        raise ValueError(
            f"compute lists and chunks must agree: the lists use chunks {sorted(used)}, "
            f"there are {len(chunks)}, give one chunk per stage"
        )


def _add_transfers(timeline: Timeline, chunks: Sequence[Chunk]) -> ComputeLists:
    """Insert each boundary tensor's transfer in both lists at the time when it is produced.

    Transfers of one instant that touch a rank become one exchange there; all of them are one atomic event of
    the global order. A rank that is busy at the time gets them after the action under way. Chunks that share
    a rank need no transfer.
    """
    transfers: list[dict[float, list[Action]]] = [defaultdict(list) for _ in timeline.ranks]
    for spans in timeline.ranks:
        for span in spans:
            send = _send(span.action, chunks)
            if send is not None:
                for transfer in (send, counterpart(send)):
                    transfers[chunks[transfer.piece[0]].rank][span.end].append(transfer)
    lists = []
    for spans, by_time in zip(timeline.ranks, transfers, strict=True):
        # At one instant transfers (0) precede the compute action that starts then (1).
        events = [(span.start, 1, span.action) for span in spans]
        events += [(time, 0, _fuse(group)) for time, group in by_time.items()]
        lists.append(tuple(action for _, _, action in sorted(events, key=lambda event: event[:2])))
    return tuple(lists)


def _send(action: Action, chunks: Sequence[Chunk]) -> Action | None:
    """Return the send of the tensor that a compute action produces, if it leaves the rank."""
    chunk, microbatch = action.piece
    if action.kind is Kind.F:
        neighbour, kind = chunk + 1, Kind.SEND_F
    elif action.kind in INPUT_GRADIENT:
        neighbour, kind = chunk - 1, Kind.SEND_B
    else:
        return None
    if not 0 <= neighbour < len(chunks) or chunks[neighbour].rank == chunks[chunk].rank:
        return None
    return Action(kind, chunk, microbatch)


def _fuse(group: list[Action]) -> Action:
    if len(group) == 1:
        return group[0]
    ordered = sorted(group, key=lambda transfer: (_KIND_ORDER.index(transfer.kind), transfer.piece))
    return Action(Kind.EXCHANGE, subs=tuple(ordered))


def _add_reductions(actions: Sequence[Action], buckets: Sequence[Bucket]) -> tuple[Action, ...]:
    """Start each chunk's buckets, in their order, inside the chunk's last backward action."""
    reduces: dict[int, list[Action]] = defaultdict(list)
    for bucket in buckets:
        reduces[bucket.chunk].append(Action(Kind.REDUCE, index=bucket.index))
    last_backward = {action.piece[0]: position for position, action in enumerate(actions) if action.kind in BACKWARD}
    lowered = list(actions)
    for chunk, position in last_backward.items():
        backward = lowered[position]
        lowered[position] = Action(backward.kind, *backward.piece, subs=tuple(reduces[chunk]))
    return tuple(lowered)


def _add_waits(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Wait for each asynchronous action as late as its use allows.

    A receive: right before the compute action that reads it. A send: right before the next send in the same
    direction from the same chunk, and of an activation no later than the backward of its micro-batch, which
    lets go of it. Everything still under way after the last action: there, in one wait.
    """
    lowered: list[Action] = []
    under_way: list[Action] = []
    for action in actions:
        due = [posted for posted in under_way if _is_due(posted, action)]
        if due:
            lowered.append(Action(Kind.WAIT, subs=tuple(due)))
            under_way = [posted for posted in under_way if posted not in due]
        lowered.append(action)
        under_way += action.transfers + action.reduces
    if under_way:
        lowered.append(Action(Kind.WAIT, subs=tuple(under_way)))
    return tuple(lowered)


def _is_due(posted: Action, action: Action) -> bool:
    """Tell whether `posted` must be complete before `action` starts."""
    if posted.kind in SENDS:
        same_way = [(send.kind, send.chunk) for send in action.transfers]
        if (posted.kind, posted.chunk) in same_way:
            return True
    if action.kind not in COMPUTE or posted.kind not in TRANSFERS or posted.piece != action.piece:
        return False
    if action.kind is Kind.F:
        return posted.kind is Kind.RECV_F
    return posted.kind in (Kind.RECV_B, Kind.SEND_F) and action.kind in INPUT_GRADIENT


def _add_ending(
    actions: Sequence[Action], rank: int, chunks: Sequence[Chunk], ties: Sequence[Tie]
) -> tuple[Action, ...]:
    """Reduce the ties with a member on this rank, then clip and step."""
    own = [tie for tie in ties if rank in {chunks[chunk].rank for chunk in tie.chunks}]
    reduces = (Action(Kind.TIE_REDUCE, index=tie.index) for tie in own)
    return (*actions, *reduces, Action(Kind.CLIP), Action(Kind.STEP))
