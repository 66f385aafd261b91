"""Waits: each asynchronous action is waited for as late as its use allows, each one separately."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tpengine.plan.actions import COMPUTE, INPUT_GRADIENT, SENDS, WEIGHT_GRADIENT, Action, Kind
from tpengine.plan.plan import Bucket


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
