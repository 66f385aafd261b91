"""A timeline: what each pipeline rank does and when, predicted or measured; and the figures computed from it.

The clock (clock.py: communication takes no time), the simulator (simulator.py) and a measured run all produce this
data, so one drawing and one set of figures serve all three. Times are in the unit of the costs: seconds if they are
measured, else the duration of one forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tpengine.plan.actions import BACKWARD, Action, Kind


@dataclass(frozen=True, slots=True)
class Span:
    """An action with its start and end."""

    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        """Return end - start."""
        return self.end - self.start


@dataclass(frozen=True)
class RankTimeline:
    """One rank in time; every tuple is ordered by start.

    Attributes:
        compute: compute actions, ties, CLIP and STEP: all that occupies the rank itself.
        sends, receives: transfers under way, from when both sides can start until the tensor has arrived.
        reductions, gathers: gradients (`r`) and weights (`g`) of buckets under way, on one stream of their own. Gathers
            of measured steps are not recorded.
        waits: where the rank was idle: in a WAIT, or in an action that needs other ranks; `Span.action` is that
            action. What it waited for decides whether the time is exposed communication or bubble (`StepFigures`).
        memory: (time, bytes held from then on), changes only; empty where bytes are not known.
    """

    compute: tuple[Span, ...] = ()
    sends: tuple[Span, ...] = ()
    receives: tuple[Span, ...] = ()
    reductions: tuple[Span, ...] = ()
    gathers: tuple[Span, ...] = ()
    waits: tuple[Span, ...] = ()
    memory: tuple[tuple[float, float], ...] = ()

    @property
    def end(self) -> float:
        """Return the end of whatever ends last."""
        lanes = (self.compute, self.sends, self.receives, self.reductions, self.gathers, self.waits)
        return max((span.end for lane in lanes for span in lane), default=0.0)

    @property
    def peak_bytes(self) -> float:
        """Return the most bytes held at once."""
        return max((held for _, held in self.memory), default=0.0)


@dataclass(frozen=True)
class Timeline:
    """All ranks in time.

    Attributes:
        ranks: one per pipeline rank.
        critical_path: the spans that decide the makespan, first to last, as (rank, span). The first begins at 0. Each
            other begins when the one before it ends, or earlier in two cases: a transfer begins before the end of the
            previous transfer on the same link by the latency, and a reduction begins inside the action that starts it.
            Empty where it was not traced.
    """

    ranks: tuple[RankTimeline, ...]
    critical_path: tuple[tuple[int, Span], ...] = field(default=(), compare=False)

    @property
    def makespan(self) -> float:
        """Return the end of the last action; the first starts at 0."""
        return max((rank.end for rank in self.ranks), default=0.0)

    @property
    def bubble(self) -> float:
        """Return the share of num_ranks * makespan in which no rank computes, from 0 to 1."""
        whole = len(self.ranks) * self.makespan
        busy = sum(span.duration for rank in self.ranks for span in rank.compute)
        return 1.0 - busy / whole if whole else 0.0

    @property
    def peak_live_activations(self) -> tuple[float, ...]:
        """Return each rank's largest number of micro-batches whose activations it holds.

        An activation lives from the start of F to the end of B (or of the later of I and W), or to the end of F in a
        forward-only plan. Unit: all layers of the rank, so each chunk of a rank with v chunks counts 1/v.
        """
        return tuple(_peak_live(rank.compute) for rank in self.ranks)


def _peak_live(spans: Sequence[Span]) -> float:
    backwards_left: Counter[tuple[int, int]] = Counter(
        span.action.piece for span in spans if span.action.kind in BACKWARD
    )
    live = peak = 0
    chunks: set[int] = set()
    for span in spans:
        if span.action.chunk is None:
            continue
        chunks.add(span.action.chunk)
        if span.action.kind is Kind.F:
            live += 1
            peak = max(peak, live)
        else:
            backwards_left[span.action.piece] -= 1
        if not backwards_left[span.action.piece]:
            live -= 1
    return peak / max(len(chunks), 1)
