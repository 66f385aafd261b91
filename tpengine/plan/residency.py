"""Residency: when weights that a replica holds only in part are gathered, and when they are freed.

A compute action uses all buckets of its chunk. A bucket's weights are whole in windows of a rank's compute actions,
from the first to the last that uses them:

    UPDATED               one window, which never ends: STEP gave this replica the new values of its slice only
    SLICED, kept          one window, from the first use in the plan to the last
    SLICED, for one use   a window for each F and each B, and from each I to its W; windows that overlap are one. W uses
                          the weights too: between I and W nothing is freed, so that all that depends on the weights of
                          one micro-batch has been sent before they go

A gather starts when a compute action begins, so that this action hides it, and is waited for right before the window
(`add_waits`). A free happens when the window's last action ends. Gathers of one place are in the order in which they
are used: forward uses the buckets of a chunk in the reverse of the order in which backward completes them.

The decision a reader will question is how early a gather starts.
    Windows for one use: one compute action before the window. Each action more would hold the weights of one chunk more
    all the time, and to hold few is what these windows are for. A bucket that is freed by that very action is gathered
    behind it by an action of its own, which no computation hides. So nothing is hidden where a rank has one chunk, but
    for the time in which it waits for another rank.
    Kept windows: when the rank first uses the chunk before it, in order of first use. This costs no memory at the peak:
    from the first use of its last chunk on, a rank holds all its kept buckets anyway, and it holds few activations
    before. And it is as early as is useful. The gathers of a rank run one after another in the order of their first
    use, so an earlier start would only compete with the transfers of the first micro-batches. On the unit clock
    p forwards of a chunk lie between the first uses of two chunks of interleaved, 2 (p - r) - 1 between those of zbv on
    rank r. `slack` tells how much time follows a chunk's last backward; here it is what precedes the first forward
    that counts.
    The first chunk of a rank has no computation before it: its gathers are actions of their own at the beginning of the
    list, where all ranks but the first wait for their first receive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from tpengine.plan.actions import COMPUTE, Action, Kind
from tpengine.plan.plan import Bucket, Residency, Weights

# A rank's compute actions are counted from 0; this place is before the first of them.
_BEGINNING = -1


class _Window(NamedTuple):
    """The compute actions of a rank, first and last, over which a bucket is whole."""

    first: int
    last: int


class _Changes(NamedTuple):
    """What to add to a rank's list, by the number of a compute action.

    Attributes:
        inside: gathers that start with the action.
        behind: gathers that are actions of their own behind it.
        frees: what is freed when it ends.
    """

    inside: defaultdict[int, list[Action]]
    behind: defaultdict[int, list[Action]]
    frees: defaultdict[int, list[Action]]


def add_residency(actions: Sequence[Action], buckets: Sequence[Bucket], residency: Residency) -> tuple[Action, ...]:
    """Insert gathers and frees of one rank's buckets.

    Args: actions: the rank's list, with transfers and reductions. buckets: that rank's; those of a chunk are listed in
        the order in which backward completes them. residency: for the SLICED ones.
    Returns: the list; as it was where all buckets are WHOLE.
    """
    compute = [action for action in actions if action.kind in COMPUTE]
    partial = [bucket for bucket in buckets if bucket.weights is not Weights.WHOLE]
    if not compute or not partial:
        return tuple(actions)
    changes = _changes(compute, partial, residency)
    lowered = list(changes.behind[_BEGINNING])
    number = 0
    for action in actions:
        if action.kind not in COMPUTE:
            lowered.append(action)
            continue
        subs = (*changes.inside[number], *action.subs, *changes.frees[number])
        lowered.append(Action(action.kind, *action.piece, subs=subs))
        lowered += changes.behind[number]
        number += 1
    return tuple(lowered)


def _changes(compute: Sequence[Action], buckets: Sequence[Bucket], residency: Residency) -> _Changes:
    uses: defaultdict[int, list[int]] = defaultdict(list)
    for number, action in enumerate(compute):
        uses[action.piece[0]].append(number)
    first_uses = sorted(numbers[0] for numbers in uses.values())
    before = dict(zip(first_uses, [_BEGINNING, *first_uses], strict=False))
    # (where the window begins, place in the order of use there, whether inside the action, its number, gather)
    gathers: list[tuple[int, int, bool, int, Action]] = []
    frees: defaultdict[int, list[Action]] = defaultdict(list)
    for place, bucket in enumerate(buckets):
        gather, free = (Action(kind, index=bucket.index) for kind in (Kind.GATHER, Kind.FREE))
        used = sorted(number for chunk in bucket.chunks for number in uses.get(chunk, ()))
        is_kept = bucket.weights is Weights.UPDATED or residency is Residency.STEP
        windows = ([_Window(used[0], used[-1])] if used else []) if is_kept else _windows(compute, used)
        freed_by = _BEGINNING
        for window in windows:
            start = before[window.first] if is_kept else window.first - 1
            order = -place if compute[window.first].kind is Kind.F else place
            gathers.append((window.first, order, start > freed_by, start, gather))
            if bucket.weights is Weights.SLICED:
                frees[window.last].append(free)
            freed_by = window.last
    changes = _Changes(defaultdict(list), defaultdict(list), frees)
    for _, _, is_inside, start, gather in sorted(gathers, key=lambda entry: entry[:2]):
        (changes.inside if is_inside else changes.behind)[start].append(gather)
    return changes


def _windows(compute: Sequence[Action], used: Sequence[int]) -> list[_Window]:
    """Return one window for each F and B, and from each I to its W; those that overlap are one."""
    windows: list[_Window] = []
    # Pieces between I and W.
    halves: set[tuple[int, int]] = set()
    for number in used:
        action = compute[number]
        windows.append(_Window(windows.pop().first if halves else number, number))
        if action.kind is Kind.I:
            halves.add(action.piece)
        elif action.kind is Kind.W:
            halves.discard(action.piece)
    return windows
