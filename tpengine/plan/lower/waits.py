"""Waits: what was started asynchronously is waited for as late as its use allows, each on its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from tpengine.plan.actions import INPUT_GRADIENT, SENDS, Action, Kind


def add_waits(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Insert WAIT actions, so that communication runs beside everything between its post and its use.

    A receive is waited for right before the compute action that reads it, a send right before the next one in the same
    direction from the same chunk, and that of an activation no later than the backward of its micro-batch, which lets
    go of it: so a chunk has one send a direction under way. Everything still under way after the last action is waited
    for there, in one wait.

    Args: actions: one rank's list, with transfers and reductions.
    Returns: the list with its waits; those due at one place are one action, in the order in which they were posted.
    """
    lowered: list[Action] = []
    # When each was posted.
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
