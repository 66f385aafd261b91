"""What ranks would have recorded of a simulated step: records whose times are known."""

from __future__ import annotations

from collections import defaultdict, deque

from tpengine.observe.records import Ran, RankRecord, Waited
from tpengine.plan import Action, Kind, Plan, Timeline
from tpengine.plan.actions import BUCKET, COMPUTE


def recorded(plan: Plan, timeline: Timeline, copies: bool = False) -> tuple[RankRecord, ...]:
    """Return the records of ranks whose actions ran as simulated; posting takes no time."""
    return tuple(_record(plan, timeline, rank, copies) for rank in range(plan.num_ranks))


def _record(plan: Plan, timeline: Timeline, rank: int, copies: bool) -> RankRecord:
    lanes = timeline.ranks[rank]
    compute = iter(lanes.compute)
    # A bucket is gathered and reduced several times, and waited for as often.
    ended: defaultdict[Action, deque[int]] = defaultdict(deque)
    for lane in (lanes.sends, lanes.receives, lanes.reductions, lanes.gathers):
        for under_way in lane:
            ended[under_way.action].append(_ns(under_way.end))
    ran: list[Ran] = []
    starts: defaultdict[Action, list[int]] = defaultdict(list)
    waited: defaultdict[Action, list[Waited]] = defaultdict(list)
    now = 0
    for action in plan.actions[rank]:
        begin = now
        if action.kind is Kind.WAIT:
            for sub in action.subs:
                there = ended[sub].popleft()
                done = there if sub.kind in BUCKET else None
                waited[sub].append(Waited(now, max(now, there), there <= now, done))
                now = max(now, there)
        elif action.kind in COMPUTE or action.kind in (Kind.TIE_REDUCE, Kind.CLIP, Kind.STEP):
            span = next(compute)
            if action.kind in COMPUTE:
                begin = _ns(span.start)
            now = _ns(span.end)
            for k, sub in enumerate(action.reduces):
                starts[sub].append(begin + (now - begin) * (k + 1) // len(action.reduces))
            for sub in action.gathers if action.kind in COMPUTE else ():
                starts[sub].append(begin)
        elif action.kind in (Kind.GATHER, Kind.REDUCE):
            starts[action].append(now)
        ran.append(Ran(action, begin, now))
    return RankRecord(tuple(ran), starts, waited, copies)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
