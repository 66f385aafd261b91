"""Waits: each asynchronous action is waited for as late as its use allows, each one separately."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from tpengine.plan.actions import INPUT_GRADIENT, SENDS, Action, Kind


def add_waits(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Insert WAIT actions, so that communication overlaps everything between its post and its use.

    A receive is waited for right before the compute action that reads it. A send is waited for right before the next
    send in the same direction from the same chunk, so a chunk has one send per direction under way; the send of an
    activation at the latest before the backward of its micro-batch, which frees the activation. Everything still under
    way after the last action is waited for there, in one wait.

    Args: actions: one rank's list, with transfers and reductions.
    Returns: the list with its waits; waits due at one place are one action, in the order of posting.
    """
    lowered: list[Action] = []
    # Actions posted and not yet waited for, with the number of their posting.
    under_way: dict[Action, int] = {}
    place = itertools.count()
    latest: dict[tuple[Kind, int], Action] = {}
    for action in actions:
        due = {posted for posted in _needed(action, latest) if posted in under_way}
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


def _needed(action: Action, latest: dict[tuple[Kind, int], Action]) -> Iterator[Action]:
    """Yield what must be complete, if it was posted at all, before `action` starts."""
    if action.kind in SENDS:
        before = latest.get((action.kind, action.piece[0]))
        if before is not None:
            yield before
    elif action.kind is Kind.F:
        yield Action(Kind.RECV_F, *action.piece)
    elif action.kind in INPUT_GRADIENT:
        yield Action(Kind.RECV_B, *action.piece)
        yield Action(Kind.SEND_F, *action.piece)
