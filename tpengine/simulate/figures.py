"""Figures of a step: where each rank's time went and who waited for whom, of a simulated or a measured timeline.

A rank's time from 0 to the makespan falls into four parts, which add up to it:

    computing    in compute actions, ties, CLIP and STEP
    exposed      standing still for what was under way: communication that nothing hides
    bubble       standing still for another rank that had not come so far
    idle         the rest: done before the others; in a measured step also what no span covers

What a rank stands still for is, of the actions that a WAIT lists, the one that is complete last; a wait is exposed
while a transfer is under way (its span in `sends` or `receives`) and bubble before, both spent on the transfer's other
side; for a reduction, which the rank itself has begun, it is all exposed, and spent on no rank of the pipeline. A
TIE_REDUCE or CLIP is waited for as bubble, on the member that stands still least in it: who comes last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tpengine.plan.actions import BUCKET, TRANSFERS, Action, Kind
from tpengine.plan.plan import Plan
from tpengine.plan.timeline import Span, Timeline


@dataclass(frozen=True)
class RankFigures:
    """One rank's time, in the timeline's unit, and memory.

    Attributes:
        computing, exposed, bubble, idle: parts of the makespan, as the module says.
        peak_bytes: the most bytes held at once; 0 where bytes are not known.
    """

    computing: float
    exposed: float
    bubble: float
    idle: float
    peak_bytes: float


@dataclass(frozen=True)
class StepFigures:
    """What a step comes to.

    Attributes:
        makespan: its length.
        bubble: the share of num_ranks * makespan in which a rank does not compute, whatever it does instead.
        exposed: the share in which a rank stands still for communication under way; a part of `bubble`.
        ranks: each rank's.
        waited: (waiting rank, rank waited for) -> time, where above 0.
    """

    makespan: float
    bubble: float
    exposed: float
    ranks: tuple[RankFigures, ...]
    waited: Mapping[tuple[int, int], float]

    @classmethod
    def of(cls, plan: Plan, timeline: Timeline) -> StepFigures:
        """Read the figures off a timeline of the plan.

        Args: timeline: simulated, or measured with the plan's actions: every list complete, times from 0.
        """
        last_members = _last_members(plan, timeline)
        waited: defaultdict[tuple[int, int], float] = defaultdict(float)
        ranks = []
        for rank, lanes in enumerate(timeline.ranks):
            exposed, bubble = 0.0, 0.0
            transfers = {span.action: span for lane in (lanes.sends, lanes.receives) for span in lane}
            spans = transfers | {span.action: span for span in lanes.reductions}
            for wait in lanes.waits:
                last = _completed_last(wait, spans)
                hidden = wait.duration if last.kind in BUCKET else _overlap(wait, transfers.get(last))
                exposed += hidden
                bubble += wait.duration - hidden
                peer = plan.peer(last) if last.kind in TRANSFERS else last_members.get(last, rank)
                if peer != rank:
                    waited[rank, peer] += wait.duration
            computing = sum(span.duration for span in lanes.compute)
            idle = max(0.0, timeline.makespan - computing - exposed - bubble)
            ranks.append(RankFigures(computing, exposed, bubble, idle, lanes.peak_bytes))
        whole = len(ranks) * timeline.makespan
        share = sum(figures.exposed for figures in ranks) / whole if whole else 0.0
        return cls(timeline.makespan, timeline.bubble, share, tuple(ranks), dict(waited))

    @property
    def slowest(self) -> int:
        """Return the rank that computes longest, the first of several."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].computing)

    def sentence(self) -> str:
        """Return the longest wait of a rank for another one in words: stage 3 waits 12 % of the step on stage 2."""
        if not self.waited:
            return "no stage waits on another"
        (waiter, peer), time = max(self.waited.items(), key=lambda item: item[1])
        return f"stage {waiter} waits {time / self.makespan:.0%} of the step on stage {peer}".replace("%", " %")


def _completed_last(wait: Span, spans: Mapping[Action, Span]) -> Action:
    """Return what a wait ended with: of several the one whose span ends last, the meeting itself where it is one."""
    if wait.action.kind is not Kind.WAIT:
        return wait.action
    return max(wait.action.subs, key=lambda sub: spans[sub].end if sub in spans else 0.0)


def _overlap(wait: Span, span: Span | None) -> float:
    """Return for how long both last."""
    return max(0.0, min(wait.end, span.end) - max(wait.start, span.start)) if span else 0.0


def _last_members(plan: Plan, timeline: Timeline) -> dict[Action, int]:
    """Return for each TIE_REDUCE and CLIP the rank that stands still least in it, the first of several."""
    members = {Action(Kind.TIE_REDUCE, index=tie.index): plan.tie_ranks(tie) for tie in plan.ties}
    members[Action(Kind.CLIP)] = tuple(range(plan.num_ranks))
    stood = {(wait.action, rank): wait.duration for rank, lanes in enumerate(timeline.ranks) for wait in lanes.waits}
    return {
        action: min((stood.get((action, rank), 0.0), rank) for rank in ranks)[1] for action, ranks in members.items()
    }
