"""Where a step's time goes, by cause, on the rank that computes longest: parts that add up to the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields

from tpengine.plan import Kind, Plan, Timeline
from tpengine.plan.actions import BUCKET, COMPUTE
from tpengine.simulate import StepFigures
from tpengine.simulate.modelled.times.sums import ActionSeconds


@dataclass(frozen=True)
class StepParts:
    """Seconds of a step by cause.

    Attributes:
        compute: operators of forward and backward.
        again: operators that backward runs a second time (recomputation).
        tp: exchanges of tensor-parallel ranks that no operator hides.
        pp: waiting for a transfer between stages that is under way.
        dp: waiting for gathers and reductions over replicas.
        bubble: waiting for other stages that are not that far yet.
        optimizer: clipping, tied embeddings' sum, the update.
        host: starting operators, where it takes longer than they do.
        exact: what exact mode takes longer.
    """

    compute: float
    again: float
    tp: float
    pp: float
    dp: float
    bubble: float
    optimizer: float
    host: float
    exact: float

    @classmethod
    def of(cls, plan: Plan, timeline: Timeline, seconds: Mapping[tuple[Kind, int], ActionSeconds]) -> StepParts:
        """Return the parts of a simulated step.

        Args:
            plan, timeline: the plan and its simulation.
            seconds: what its compute actions take, by cause; the simulation's costs were their totals.
        """
        figures = StepFigures.of(plan, timeline)
        rank = figures.slowest
        of_rank, lanes = figures.ranks[rank], timeline.ranks[rank]
        number = Counter((span.action.kind, span.action.chunk) for span in lanes.compute if span.action.kind in COMPUTE)
        spent = {
            name: sum(getattr(seconds[kind, chunk or 0], name) * count for (kind, chunk), count in number.items())
            for name in ("compute", "again", "exchange", "host", "exact")
        }
        # Where the same core moves buckets, the actions that start them take longer (Costs.reduce_share).
        slowed = sum(span.duration for span in lanes.compute if span.action.kind in COMPUTE) - sum(spent.values())
        buckets = sum(time for kind, time in of_rank.waited_in.items() if kind in BUCKET)
        return cls(
            compute=spent["compute"],
            again=spent["again"],
            tp=spent["exchange"],
            pp=of_rank.exposed - buckets,
            dp=buckets + slowed,
            bubble=of_rank.bubble + of_rank.idle,
            optimizer=sum(span.duration for span in lanes.compute if span.action.kind not in COMPUTE),
            host=spent["host"],
            exact=spent["exact"],
        )

    @property
    def step(self) -> float:
        """Return the sum of the parts."""
        return sum(getattr(self, field.name) for field in fields(self))

    def less(self, other: StepParts) -> dict[str, float]:
        """Return by how many seconds each part is longer than another step's."""
        return {field.name: getattr(self, field.name) - getattr(other, field.name) for field in fields(self)}
