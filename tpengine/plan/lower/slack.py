"""Slack: the time between a chunk's last backward and the end of the step, in which its reductions can be hidden."""

from __future__ import annotations

from collections.abc import Mapping

from tpengine.plan.actions import WEIGHT_GRADIENT, Kind
from tpengine.plan.clock import clock
from tpengine.plan.schedules import Schedule


def slack(schedule: Schedule, durations: Mapping[tuple[Kind, int], float] | None = None) -> tuple[float, ...]:
    """Return how long before the end of all compute each chunk's last backward ends.

        slack[c] = makespan - end of the last B or W of chunk c;   on 1f1b slack[r] = r * t_B

    A chunk with slack can reduce its gradients in few large buckets, which use the links best. A chunk without slack
    has to hide its reductions inside its last backward: small buckets, in the order in which it fills them.

    Args:
        schedule: compute actions, with backwards.
        durations: as for `clock`; None for its units.
    Returns: one time per chunk, in model order, in the unit of the durations, 0 or more. Reductions and transfers are
        assumed to take no time.
    Raises: ValueError: as `clock`, or a chunk has no backward.
    """
    timeline = clock(schedule.compute, durations)
    ends = {
        span.action.piece[0]: span.end
        for rank in timeline.ranks
        for span in rank.compute
        if span.action.kind in WEIGHT_GRADIENT
    }
    without = [chunk for chunk in range(len(schedule.ranks)) if chunk not in ends]
    if without:
        raise ValueError(f"slack needs a backward of every chunk: {schedule.name} has none of chunks {without}")
    makespan = timeline.makespan
    return tuple(makespan - ends[chunk] for chunk in range(len(schedule.ranks)))
