"""A timeline, predicted or measured, and the clock: when each compute action runs if communication takes no time.

The clock, the simulator (planner/simulator.py) and a measured run all produce timelines, so one drawing and one set of
figures serve all three. Times are in the unit of the costs: seconds if they are measured, else the duration of one
forward.

In the clock an action starts once its rank is free and its inputs exist; one pass over the actions finds all times.
Lowering orders transfers by this clock, and generators are measured with it. Simulation and execution follow the lists,
so they run actions in the same order. The simulator adds communication, memory and reductions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tpengine.plan.actions import BACKWARD, COMPUTE, INPUT_GRADIENT, Action, Kind

# What a compute action produces or needs: the kind that produces it (I also stands for B), chunk, micro-batch.
Value = tuple[Kind, int, int]


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


def clock(compute: Sequence[Iterable[Action]], durations: Mapping[tuple[Kind, int], float] | None = None) -> Timeline:
    """Return when each compute action runs if communication takes no time, from one list per rank.

    Args:
        compute: one list per rank; only the compute actions count.
        durations: by (kind, chunk), above 0, in any unit; None for `unit_durations`: all chunks of a rank together
            take 1 for a forward and 2 for a backward.
    Returns: start and end of every compute action; the first starts at 0.
    Raises: ValueError: a duration is missing or not positive, or the lists cannot finish.
    Cost: linear in the number of actions.
    """
    lists = [[action for action in actions if action.kind in COMPUTE] for actions in compute]
    lengths = _durations(lists) if durations is None else durations
    _check_durations(lists, lengths)
    last_chunk = max((action.piece[0] for actions in lists for action in actions), default=0)
    spans: list[list[Span]] = [[] for _ in lists]
    ready_at: dict[Value, float] = {}
    # Ranks whose next action lacks an input, by that input.
    waiting: dict[Value, list[int]] = {}
    movable = list(reversed(range(len(lists))))
    while movable:
        rank = movable.pop()
        actions, done = lists[rank], spans[rank]
        while len(done) < len(actions):
            action = actions[len(done)]
            needed = inputs(action, last_chunk)
            missing = next((value for value in needed if value not in ready_at), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            start = max([ready_at[value] for value in needed], default=0.0)
            if done:
                start = max(start, done[-1].end)
            done.append(Span(action, start, start + lengths[action.kind, action.piece[0]]))
            made = output(action)
            ready_at[made] = done[-1].end
            movable.extend(waiting.pop(made, ()))
    _check_finished(lists, spans, last_chunk, ready_at)
    return Timeline(tuple(RankTimeline(compute=tuple(done)) for done in spans))


def unit_durations(num_chunks_per_rank: Mapping[int, int]) -> dict[tuple[Kind, int], float]:
    """Return durations by (kind, chunk): all chunks of a rank together take F 1, B 2, I 1 and W 1.

    Args: num_chunks_per_rank: by chunk, how many chunks its rank holds.
    """
    units = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0}
    return {
        (kind, chunk): unit / shared for chunk, shared in num_chunks_per_rank.items() for kind, unit in units.items()
    }


def whole_unit_durations(ranks: Sequence[int]) -> dict[tuple[Kind, int], float]:
    """Return unit durations scaled to whole numbers, so that equal times are equal floats.

    Args: ranks: the rank of each chunk.
    """
    num_chunks = Counter(ranks)
    whole = math.lcm(*num_chunks.values())
    units = unit_durations({chunk: num_chunks[rank] for chunk, rank in enumerate(ranks)})
    return {key: float(round(duration * whole)) for key, duration in units.items()}


def inputs(action: Action, last_chunk: int) -> list[Value]:
    """Return the values that a compute action needs before it can start."""
    chunk, microbatch = action.piece
    match action.kind:
        case Kind.F:
            return [(Kind.F, chunk - 1, microbatch)] if chunk > 0 else []
        case Kind.W:
            return [(Kind.I, chunk, microbatch)]
    from_next = [(Kind.I, chunk + 1, microbatch)] if chunk < last_chunk else []
    return [(Kind.F, chunk, microbatch), *from_next]


def output(action: Action) -> Value:
    """Return the value that a compute action produces."""
    return (Kind.I if action.kind in INPUT_GRADIENT else action.kind, *action.piece)


def _durations(lists: Sequence[Sequence[Action]]) -> dict[tuple[Kind, int], float]:
    rank_of = {action.piece[0]: rank for rank, actions in enumerate(lists) for action in actions}
    num_chunks = Counter(rank_of.values())
    return unit_durations({chunk: num_chunks[rank] for chunk, rank in rank_of.items()})


def _check_durations(lists: Sequence[Sequence[Action]], durations: Mapping[tuple[Kind, int], float]) -> None:
    for kind, chunk in {(action.kind, action.piece[0]) for actions in lists for action in actions}:
        if not durations.get((kind, chunk), 0.0) > 0.0:
            raise ValueError(
                f"every compute action needs a duration above 0: {kind} of chunk {chunk} has "
                f"{durations.get((kind, chunk))}"
            )


def _check_finished(
    lists: Sequence[Sequence[Action]],
    spans: Sequence[Sequence[Span]],
    last_chunk: int,
    ready_at: Mapping[Value, float],
) -> None:
    for rank, (actions, done) in enumerate(zip(lists, spans, strict=True)):
        if len(done) < len(actions):
            action = actions[len(done)]
            kind, chunk, microbatch = next(v for v in inputs(action, last_chunk) if v not in ready_at)
            producer = f"{chunk}{'B' if kind is Kind.I else kind.value}{microbatch}"
            raise ValueError(f"compute lists must finish: rank {rank} waits in {action} for {producer}")
