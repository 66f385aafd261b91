"""Checks of counts: what forwards count is reduced once, when the last of them has run, and is there before CLIP.

Counts are one more bucket of a rank: they have an index among those of its buckets, are summed over the same stream,
and are waited for as those are. Unlike a gradient they are complete before the last backward begins: nothing inside an
action starts their sum, it is an action of its own.

That the sum has ended before CLIP is one rule for all reductions, in verify_buckets.py; that a wait names what was
posted, in verify_transfers.py.
"""

from __future__ import annotations

from tpengine.plan.actions import Action, Kind
from tpengine.plan.plan import CountBucket, Plan, fault


def check_counts(plan: Plan) -> None:
    """Check the counts of every rank of a training plan; one that only runs forward counts nothing."""
    for counts in plan.counts if plan.training else ():
        _check(plan, plan.chunks[counts.chunks[0]].rank, counts)


def _check(plan: Plan, rank: int, counts: CountBucket) -> None:
    actions, reduction = plan.actions[rank], Action(Kind.REDUCE, index=counts.index)
    found = []
    for position, action in enumerate(actions):
        if action == reduction:
            found.append(position)
        elif action.kind is not Kind.WAIT and reduction in action.subs:
            values = f"{reduction} of {_named(counts)} starts in {action}"
            raise fault(plan, "counts are reduced by an action of their own", values, rank, position)
    if len(found) != 1:
        position = found[1] if found else len(actions)
        raise fault(plan, "counts are reduced exactly once", f"{_named(counts)} {len(found)} times", rank, position)
    filling = [at for at, action in enumerate(actions) if action.kind is Kind.F and action.chunk in counts.chunks]
    if filling and found[0] < filling[-1]:
        values = f"{reduction} of {_named(counts)} comes before {actions[filling[-1]]}, which still adds to them"
        raise fault(plan, "counts are reduced after the last forward that adds to them", values, rank, found[0])


def _named(counts: CountBucket) -> str:
    chunks = ", ".join(map(str, counts.chunks))
    return f"counts {counts.index} of chunk{'s' if len(counts.chunks) > 1 else ''} {chunks}"
