"""The ending: what turns the step's gradients into new weights."""

from __future__ import annotations

from collections.abc import Sequence

from tpengine.plan.actions import Action, Kind
from tpengine.plan.plan import Tie


def add_ending(actions: Sequence[Action], rank: int, ranks: Sequence[int], ties: Sequence[Tie]) -> tuple[Action, ...]:
    """Sum the ties with a member on this rank, then clip by the norm of all gradients, then step.

    Args: actions: one rank's list, complete otherwise. rank: its number. ranks: the rank of each chunk. ties: of all
        ranks; every rank sums its ties in this order, so that no two ranks wait for each other.
    Returns: the list with its ending.
    """
    own = [tie for tie in ties if rank in {ranks[chunk] for chunk in tie.chunks}]
    sums = (Action(Kind.TIE_REDUCE, index=tie.index) for tie in own)
    return (*actions, *sums, Action(Kind.CLIP), Action(Kind.STEP))
