"""Bytes held at each place of a rank's list, from the list alone: an oracle for goldens of plans that gather.

Gathered weights are held from the action that starts the gather to the end of the one that frees them, a gradient
buffer from the action that fills it until its reduction has been waited for. planner/memory.py adds activations and
times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tpengine.plan import Action, Kind, Plan, Reduced, Weights

_NONE: Mapping[int, float] = MappingProxyType({})


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
