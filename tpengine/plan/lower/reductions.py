"""Reductions: each gradient bucket starts inside the backward action that fills it last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tpengine.plan.actions import WEIGHT_GRADIENT, Action, Kind
from tpengine.plan.plan import Bucket


def add_reductions(actions: Sequence[Action], buckets: Sequence[Bucket]) -> tuple[Action, ...]:
    """Put one REDUCE per bucket into the last B or W of its chunks, as a sub-action.

    A sub-action, not an action behind the backward: a bucket that is full early in the last backward is then reduced
    while that backward still fills the other buckets. W counts, not I: in a split backward W adds weight gradients.

    Args: actions: one rank's list. buckets: that rank's; those of one action start in the order of this list.
    Returns: the list with its buckets.
    """
    last_backward = {
        action.piece[0]: position for position, action in enumerate(actions) if action.kind in WEIGHT_GRADIENT
    }
    reduces: dict[int, list[Action]] = defaultdict(list)
    for bucket in buckets:
        filling = [last_backward[chunk] for chunk in bucket.chunks if chunk in last_backward]
        if filling:
            reduces[max(filling)].append(Action(Kind.REDUCE, index=bucket.index))
    lowered = list(actions)
    for position, subs in reduces.items():
        backward = lowered[position]
        lowered[position] = Action(backward.kind, *backward.piece, subs=tuple(subs))
    return tuple(lowered)
