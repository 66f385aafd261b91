"""Reductions: each gradient bucket starts inside the last backward action that fills it, or inside every one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tpengine.plan.actions import WEIGHT_GRADIENT, Action, Kind
from tpengine.plan.plan import Bucket, Reduced


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
        filling = sorted(position for chunk in bucket.chunks for position in backwards.get(chunk, ()))
        for position in filling if bucket.reduced is Reduced.MICROBATCH else filling[-1:]:
            reduces[position].append(Action(Kind.REDUCE, index=bucket.index))
    lowered = list(actions)
    for position, subs in reduces.items():
        backward = lowered[position]
        lowered[position] = Action(backward.kind, *backward.piece, subs=tuple(subs))
    return tuple(lowered)
