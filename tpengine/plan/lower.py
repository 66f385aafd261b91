"""Lowering: passes that turn compute lists into the complete plan. Each adds one thing to each rank's list.

    add_transfers    tensors are sent to the next rank as soon as they exist; receives are posted at the same time
    add_reductions   gradient buckets start inside the last backward that fills them, or inside each
    add_counts       what forwards have counted is reduced behind all that a rank computes
    add_residency    weights that a replica holds in part are gathered before use, and freed after it (residency.py)
    add_waits        each asynchronous action is waited for as late as its use allows, each one separately
    add_ending       ties, clipping, the optimizer's step

The caller chooses the buckets; `slack` tells how much time each chunk leaves for reducing them. slots.py derives from
the finished list which buffer each receive writes.

Transfers: all compute actions of all ranks are sorted into one global order, by when they end on the unit clock.
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
NCCL runs all transfers of a rank in one communicator one after another. There early receives are what lets a plan end
at all, but they hold up sends, some per cent of a step. With a communicator for each direction they do not
(README.md beside this file has the figures).

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

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tpengine.plan.actions import COMPUTE, INPUT_GRADIENT, SENDS, WEIGHT_GRADIENT, Action, Kind, counterpart
from tpengine.plan.clock import Span, clock, whole_unit_durations
from tpengine.plan.plan import Bucket, Chunk, CountBucket, Plan, Reduced, Residency, Tie
from tpengine.plan.residency import add_residency
from tpengine.plan.schedule import ComputeLists, Schedule

# A place in the global order: the time, then the order among actions that end at this time.
_Place = tuple[float, int, int]


def lower(
    schedule: Schedule,
    chunks: Sequence[Chunk],
    buckets: Sequence[Bucket],
    ties: Sequence[Tie],
    num_microbatches: int,
    num_layers: int,
    training: bool,
    residency: Residency = Residency.STEP,
    counts: Sequence[CountBucket] = (),
) -> Plan:
    """Complete compute lists to a plan. It is not verified here: pass it to `verify`.

    Args:
        schedule: compute actions, from a generator; backwards of chunks that have none are left out.
        chunks: the model's pieces in model order, on the ranks that the schedule gives them.
        buckets: what to gather and reduce. Those that the same backward completes are listed in the order in which it
            does.
        ties: parameters shared between ranks, in the order in which every member sums them.
        num_microbatches: micro-batches of one data-parallel replica.
        num_layers: layers of the whole model.
        training: False leaves out reductions, ties, clipping and the step.
        residency: how long the gathered weights of SLICED buckets are kept.
        counts: what forwards count, where replicas sum it; a plan without training does not.
    Returns: the plan.
    Raises: ValueError: the compute lists cannot finish, or schedule and chunks do not agree.
    Cost: O(n log n) in the number n of actions, sub-actions included.
    """
    _check_chunks(schedule, chunks)
    first = next((index for index, chunk in enumerate(chunks) if chunk.has_backward), 0)
    lists = add_transfers(schedule.with_backward_from(first), first)
    own = _buckets_by_rank(schedule.ranks, buckets)
    if training:
        lists = tuple(add_reductions(actions, own[rank]) for rank, actions in enumerate(lists))
        lists = tuple(add_counts(actions, rank, schedule.ranks, counts) for rank, actions in enumerate(lists))
    lists = tuple(add_residency(actions, own[rank], residency) for rank, actions in enumerate(lists))
    lists = tuple(add_waits(actions, own[rank]) for rank, actions in enumerate(lists))
    if training:
        lists = tuple(add_ending(actions, rank, schedule.ranks, ties) for rank, actions in enumerate(lists))
    return Plan(
        schedule=schedule.name,
        num_microbatches=num_microbatches,
        num_layers=num_layers,
        chunks=tuple(chunks),
        buckets=tuple(buckets),
        ties=tuple(ties),
        actions=lists,
        training=training,
        counts=tuple(counts) if training else (),
    )


def _check_chunks(schedule: Schedule, chunks: Sequence[Chunk]) -> None:
    ranks = tuple(chunk.rank for chunk in chunks)
    used = {action.piece[0] for actions in schedule.compute for action in actions}
    if ranks != schedule.ranks or used != set(range(len(ranks))):
        raise ValueError(
            f"schedule and chunks must agree: the lists use chunks {sorted(used)} on ranks {list(schedule.ranks)}, the "
            f"chunks are on ranks {list(ranks)}: give one chunk for each of the schedule's"
        )


def _buckets_by_rank(ranks: Sequence[int], buckets: Sequence[Bucket]) -> Mapping[int, Sequence[Bucket]]:
    """Return each rank's buckets; what is wrong with a bucket is for `verify` to say."""
    found: dict[int, list[Bucket]] = {rank: [] for rank in ranks}
    for bucket in buckets:
        for rank in {ranks[chunk] for chunk in bucket.chunks if 0 <= chunk < len(ranks)}:
            found[rank].append(bucket)
    return found


def add_transfers(schedule: Schedule, first: int = 0) -> ComputeLists:
    """Insert sends and receives into the lists of compute actions.

    Chunks that share a rank need no transfer.

    Args: schedule: compute actions and the chunks' ranks. first: the first chunk that has a backward.
    Returns: one list per rank.
    Raises: ValueError: the lists cannot finish.
    """
    timeline = clock(schedule.compute, whole_unit_durations(schedule.ranks))
    # By rank: its compute actions, and behind each the transfer of what it has produced.
    placed: defaultdict[int, list[tuple[_Place, bool, Action]]] = defaultdict(list)
    for own, rank in enumerate(timeline.ranks):
        for span in rank.compute:
            place, send = _place(span), _send(span.action, schedule.ranks, first)
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


def _send(action: Action, ranks: Sequence[int], first: int) -> Action | None:
    """Return the send of the tensor that a compute action produces, if it leaves the rank."""
    chunk, microbatch = action.piece
    if action.kind is Kind.F:
        neighbour, kind = chunk + 1, Kind.SEND_F
    elif action.kind in INPUT_GRADIENT:
        neighbour, kind = chunk - 1, Kind.SEND_B
    else:
        return None
    if kind is Kind.SEND_B and neighbour < first:
        return None
    if not 0 <= neighbour < len(ranks) or ranks[neighbour] == ranks[chunk]:
        return None
    return Action(kind, chunk, microbatch)


def add_reductions(actions: Sequence[Action], buckets: Sequence[Bucket]) -> tuple[Action, ...]:
    """Put the REDUCEs of each bucket into the B or W of its chunks, as sub-actions: into the last, or into each.

    A sub-action, not an action behind the backward: a bucket that is full early in a backward is then reduced while
    that backward still fills the other buckets. W counts, not I: in a split backward W adds weight gradients.

    Args: actions: one rank's list. buckets: that rank's; those of one action start in the order of this list.
    Returns: the list with its buckets.
    """
    backwards: dict[int, list[int]] = defaultdict(list)
    for position, action in enumerate(actions):
        if action.kind in WEIGHT_GRADIENT:
            backwards[action.piece[0]].append(position)
    reduces: dict[int, list[Action]] = defaultdict(list)
    for bucket in buckets:
        if bucket.reduced is Reduced.NEVER:
            continue
        filling = sorted(position for chunk in bucket.chunks for position in backwards.get(chunk, ()))
        for position in filling if bucket.reduced is Reduced.MICROBATCH else filling[-1:]:
            reduces[position].append(Action(Kind.REDUCE, index=bucket.index))
    lowered = list(actions)
    for position, subs in reduces.items():
        backward = lowered[position]
        lowered[position] = Action(backward.kind, *backward.piece, subs=tuple(subs))
    return tuple(lowered)


def add_counts(
    actions: Sequence[Action], rank: int, ranks: Sequence[int], counts: Sequence[CountBucket]
) -> tuple[Action, ...]:
    """Reduce what the rank has counted, behind its last action: with the buckets of the last backward on the way.

    Counts are complete earlier, after the last forward. But they are a few kilobytes, and nobody reads them before
    CLIP: reduced in the middle, replicas would wait for each other there, where their transport sums before it returns.

    Args: actions: one rank's list. rank: its number. ranks: the rank of each chunk. counts: of all ranks.
    Returns: the list with the reductions of its counts.
    """
    own = [of for of in counts if rank in {ranks[chunk] for chunk in of.chunks if 0 <= chunk < len(ranks)}]
    return (*actions, *(Action(Kind.REDUCE, index=of.index) for of in own))


def add_waits(actions: Sequence[Action], buckets: Sequence[Bucket] = ()) -> tuple[Action, ...]:
    """Insert WAIT actions, so that communication overlaps everything between its post and its use.

    A receive is waited for right before the compute action that reads it. A send is waited for right before the next
    send in the same direction from the same chunk, so a chunk has one send per direction under way; the send of an
    activation at the latest before the backward of its micro-batch, which frees the activation. A gather is waited for
    right before the first action that uses the weights, a reduction right before the next action that fills the bucket:
    so a bucket has one of each under way. Everything still under way after the last action is waited for there, in one
    wait.

    Args: actions: one rank's list, with all that it posts. buckets: that rank's.
    Returns: the list with its waits; waits due at one place are one action, in the order of posting.
    """
    lowered: list[Action] = []
    # Actions posted and not yet waited for, with the number of their posting.
    under_way: dict[Action, int] = {}
    place = itertools.count()
    latest: dict[tuple[Kind, int], Action] = {}
    gathers, reductions = _of_buckets(buckets, Kind.GATHER), _of_buckets(buckets, Kind.REDUCE)
    for action in actions:
        due = {posted for posted in _needed(action, latest, gathers, reductions) if posted in under_way}
        if due:
            lowered.append(Action(Kind.WAIT, subs=tuple(sorted(due, key=under_way.__getitem__))))
            for posted in due:
                del under_way[posted]
        lowered.append(action)
        for posted in action.posts:
            under_way[posted] = next(place)
            if posted.kind in SENDS:
                latest[posted.kind, posted.piece[0]] = posted
    if under_way:
        lowered.append(Action(Kind.WAIT, subs=tuple(under_way)))
    return tuple(lowered)


def _of_buckets(buckets: Sequence[Bucket], kind: Kind) -> Mapping[int, Sequence[Action]]:
    """Return the gathers or the reductions of each chunk's buckets."""
    found: defaultdict[int, list[Action]] = defaultdict(list)
    for bucket in buckets:
        for chunk in bucket.chunks:
            found[chunk].append(Action(kind, index=bucket.index))
    return found


def _needed(
    action: Action,
    latest: Mapping[tuple[Kind, int], Action],
    gathers: Mapping[int, Sequence[Action]],
    reductions: Mapping[int, Sequence[Action]],
) -> Iterator[Action]:
    """Yield what must be complete, if it was posted at all, before `action` starts."""
    if action.kind in COMPUTE:
        yield from gathers.get(action.piece[0], ())
    if action.kind in WEIGHT_GRADIENT:
        yield from reductions.get(action.piece[0], ())
    if action.kind in SENDS:
        before = latest.get((action.kind, action.piece[0]))
        if before is not None:
            yield before
    elif action.kind is Kind.F:
        yield Action(Kind.RECV_F, *action.piece)
    elif action.kind in INPUT_GRADIENT:
        yield Action(Kind.RECV_B, *action.piece)
        yield Action(Kind.SEND_F, *action.piece)


def add_ending(actions: Sequence[Action], rank: int, ranks: Sequence[int], ties: Sequence[Tie]) -> tuple[Action, ...]:
    """Sum the ties with a member on this rank, then clip by the norm of all gradients, then step.

    Args: actions: one rank's list, complete otherwise. rank: its number. ranks: the rank of each chunk. ties: of all
        ranks; every rank sums its ties in this order, so that no two ranks wait for each other.
    Returns: the list with its ending.
    """
    own = [tie for tie in ties if rank in {ranks[chunk] for chunk in tie.chunks}]
    sums = (Action(Kind.TIE_REDUCE, index=tie.index) for tie in own)
    return (*actions, *sums, Action(Kind.CLIP), Action(Kind.STEP))


def slack(
    schedule: Schedule, durations: Mapping[tuple[Kind, int], float] | None = None, first: int = 0
) -> tuple[float, ...]:
    """Return how long before the end of all compute each chunk's last backward ends.

        slack[c] = makespan - end of the last B or W of chunk c;   on 1f1b slack[r] = r * t_B

    A chunk with slack can reduce its gradients in few large buckets, which use the links best. A chunk without slack
    has to hide its reductions inside its last backward: small buckets, in the order in which it fills them.

    Args:
        schedule: compute actions, with backwards.
        durations: as for `clock`; None for its units.
        first: the first chunk whose backward is run; those before have all the time.
    Returns: one time per chunk, in model order, in the unit of the durations, 0 or more. Reductions and transfers are
        assumed to take no time.
    Raises: ValueError: as `clock`, or a chunk has no backward.
    """
    timeline = clock(schedule.with_backward_from(first).compute, durations)
    ends = dict.fromkeys(range(first), 0.0) | {
        span.action.piece[0]: span.end
        for rank in timeline.ranks
        for span in rank.compute
        if span.action.kind in WEIGHT_GRADIENT
    }
    without = [chunk for chunk in range(len(schedule.ranks)) if chunk not in ends]
    if without:
        raise ValueError(f"slack needs a backward of every chunk: {schedule.name} has none of chunks {without}")
    makespan = timeline.makespan
    return tuple(makespan - ends[chunk] for chunk in range(len(schedule.ranks)))
