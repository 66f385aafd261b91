"""Figures of a step, simulated or measured: where each rank's time went, and which rank waited for which.

A rank's time from 0 to the makespan is the sum of four parts:

    computing    in compute actions, ties, CLIP and STEP
    exposed      waiting for communication under way: it is not hidden by computation
    bubble       waiting for another rank that is not that far yet
    idle         the rest: finished before the others; in a measured step also time outside all spans

A WAIT that lists several actions waits for the one that completes last. For a transfer, the wait is exposed while the
transfer is under way (its span in `sends` or `receives`) and bubble before that; both are attributed to the rank on the
other side. For a gather or reduction, which the rank itself has started, all of it is exposed and attributed to no
rank. Waiting in a TIE_REDUCE or CLIP is bubble, attributed to the member that arrives last, which is the one that waits
least in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tpengine.plan.actions import BUCKET, TRANSFERS, Action, Kind
from tpengine.plan.clock import Span, Timeline
from tpengine.plan.plan import Plan


@dataclass(frozen=True)
class RankFigures:
    """One rank's time, in the timeline's unit, and memory.

    Attributes:
        computing, exposed, bubble, idle: parts of the makespan, as the module docstring defines them.
        peak_bytes: the most bytes held at once; 0 where bytes are not known.
        waited_in: exposed and bubble together, by the kind of action that ended the wait: RECV_B in w[1RECV_B3].
    """

    computing: float
    exposed: float
    bubble: float
    idle: float
    peak_bytes: float
    waited_in: Mapping[Kind, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepFigures:
    """The figures of a whole step.

    Attributes:
        makespan: its length.
        bubble: the share of num_ranks * makespan in which ranks do not compute, for whatever reason.
        exposed: the share in which ranks wait for communication under way; a part of `bubble`.
        ranks: the figures of each rank.
        waited: (waiting rank, rank waited for) -> time, where above 0.
    """

    makespan: float
    bubble: float
    exposed: float
    ranks: tuple[RankFigures, ...]
    waited: Mapping[tuple[int, int], float]

    @classmethod
    def of(cls, plan: Plan, timeline: Timeline) -> StepFigures:
        """Return the figures of a timeline of the plan.

        Args: timeline: simulated, or measured with the plan's actions: every list complete, times from 0.
        """
        last_members = _last_members(plan, timeline)
        waited: defaultdict[tuple[int, int], float] = defaultdict(float)
        ranks = []
        for rank, lanes in enumerate(timeline.ranks):
            exposed, bubble = 0.0, 0.0
            waited_in: defaultdict[Kind, float] = defaultdict(float)
            transfers = {span.action: span for lane in (lanes.sends, lanes.receives) for span in lane}
            spans: defaultdict[Action, list[Span]] = defaultdict(list)
            for lane in (lanes.sends, lanes.receives, lanes.reductions, lanes.gathers):
                for span in lane:
                    spans[span.action].append(span)
            for wait in lanes.waits:
                last = _completed_last(wait, spans)
                hidden = wait.duration if last.kind in BUCKET else _overlap(wait, transfers.get(last))
                exposed += hidden
                bubble += wait.duration - hidden
                waited_in[last.kind] += wait.duration
                peer = plan.peer(last) if last.kind in TRANSFERS else last_members.get(last, rank)
                if peer != rank:
                    waited[rank, peer] += wait.duration
            computing = sum(span.duration for span in lanes.compute)
            idle = max(0.0, timeline.makespan - computing - exposed - bubble)
            ranks.append(RankFigures(computing, exposed, bubble, idle, lanes.peak_bytes, dict(waited_in)))
        whole = len(ranks) * timeline.makespan
        share = sum(figures.exposed for figures in ranks) / whole if whole else 0.0
        return cls(timeline.makespan, timeline.bubble, share, tuple(ranks), dict(waited))

    @property
    def slowest(self) -> int:
        """Return the rank that computes longest, the first of several."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].computing)

    def sentence(self) -> str:
        """Return the longest wait between two ranks in words: stage 3 waits 12 % of the step on stage 2."""
        if not self.waited:
            return "no stage waits on another"
        (waiter, peer), time = max(self.waited.items(), key=lambda item: item[1])
        return f"stage {waiter} waits {time / self.makespan:.0%} of the step on stage {peer}".replace("%", " %")


def _completed_last(wait: Span, spans: Mapping[Action, Sequence[Span]]) -> Action:
    """Return the action that ended a wait: the one whose span ends last, or the TIE_REDUCE or CLIP itself."""
    if wait.action.kind is not Kind.WAIT:
        return wait.action
    return max(wait.action.subs, key=lambda sub: _end_by(wait.end, spans.get(sub, ())))


def _end_by(time: float, spans: Sequence[Span]) -> float:
    """Return the end of the last of an action's spans that begins by a time: a bucket is gathered and reduced often."""
    number = bisect_right(spans, time, key=lambda span: span.start)
    return spans[number - 1].end if number else 0.0


def _overlap(wait: Span, span: Span | None) -> float:
    """Return for how long the two spans overlap."""
    return max(0.0, min(wait.end, span.end) - max(wait.start, span.start)) if span else 0.0


def _last_members(plan: Plan, timeline: Timeline) -> dict[Action, int]:
    """Return for each TIE_REDUCE and CLIP the rank that waits least in it, the first of several."""
    members = {Action(Kind.TIE_REDUCE, index=tie.index): plan.tie_ranks(tie) for tie in plan.ties}
    members[Action(Kind.CLIP)] = tuple(range(plan.num_ranks))
    stood = {(wait.action, rank): wait.duration for rank, lanes in enumerate(timeline.ranks) for wait in lanes.waits}
    return {
        action: min((stood.get((action, rank), 0.0), rank) for rank in ranks)[1] for action, ranks in members.items()
    }
