"""Held bytes: what a rank holds at each place of its list is within a limit.

The list alone decides this, without times: gathered weights are held from the action that starts the gather to the end
of the one that frees them, a gradient buffer from the action that fills it until its reduction has been waited for. The
simulator (simulate/memory.py) adds activations, and knows when a reduction ends before that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tpengine.plan.actions import Action, Kind
from tpengine.plan.plan import Plan, Reduced, Weights
from tpengine.plan.verify.fault import fault

_NONE: Mapping[int, float] = MappingProxyType({})


def check_bytes(
    plan: Plan,
    weights_bytes: Mapping[int, float],
    resident_bytes: Sequence[float],
    limit_bytes: float,
    contributions_bytes: Mapping[int, float] = _NONE,
) -> None:
    """Check that no rank holds more than the limit at any place of its list.

    Args:
        plan: one that passes `verify`.
        weights_bytes: by bucket, its gathered weights; counted where they are SLICED.
        resident_bytes: by rank, what it holds all the time.
        limit_bytes: of each rank.
        contributions_bytes: by bucket, its whole gradient buffer; counted where it is reduced every micro-batch.
    Raises: PlanError: the first place of the first rank where more is held.
    """
    for rank, resident in enumerate(resident_bytes):
        for position, held in enumerate(held_bytes(plan, rank, weights_bytes, contributions_bytes)):
            if resident + held > limit_bytes:
                values = (
                    f"rank {rank} holds {resident + held:.0f} bytes in {plan.actions[rank][position]}, "
                    f"{resident + held - limit_bytes:.0f} more than {limit_bytes:.0f}"
                )
                raise fault(plan, "bytes held stay within the limit", values, rank, position)


def held_bytes(
    plan: Plan, rank: int, weights_bytes: Mapping[int, float], contributions_bytes: Mapping[int, float] = _NONE
) -> list[float]:
    """Return what a rank holds while each action of its list runs, in bytes, beside what it holds all the time."""
    sliced = {bucket.index for bucket in plan.buckets if bucket.weights is Weights.SLICED}
    summed = {bucket.index for bucket in plan.buckets if bucket.reduced is Reduced.MICROBATCH}

    weights = {index: size for index, size in weights_bytes.items() if index in sliced}
    buffers = {index: size for index, size in contributions_bytes.items() if index in summed}
    held, now = [], 0.0
    for action in plan.actions[rank]:
        now += _sum(weights, action.gathers) + _sum(buffers, action.reduces)
        held.append(now)
        now -= _sum(weights, action.frees)
        if action.kind is Kind.WAIT:
            now -= _sum(buffers, [sub for sub in action.subs if sub.kind is Kind.REDUCE])
    return held


def _sum(sizes: Mapping[int, float], actions: Sequence[Action]) -> float:
    """Return the bytes of the buckets that the actions name."""
    return sum(sizes.get(action.index, 0.0) for action in actions if action.index is not None)
