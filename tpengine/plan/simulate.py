"""Simulate: when each compute action runs if communication takes no time; makespan, bubble, live activations.

The clock follows dataflow only: an action starts once its rank is free and its inputs exist. Lowering places
the transfers by the same clock, so simulated and executed order agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tpengine.plan.actions import BACKWARD, COMPUTE, INPUT_GRADIENT, Action, Kind
from tpengine.plan.plan import Plan

# A backward costs about two forwards: one matmul for the input's gradient, one for the weight's.
UNIT_DURATIONS: Mapping[Kind, float] = MappingProxyType({Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0})

# An input of a compute action: the kind that produces it (I stands for B as well), chunk, micro-batch.
_Value = tuple[Kind, int, int]


@dataclass(frozen=True)
class Span:
    """A compute action with its start and end, in the unit of the durations."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The compute actions of every rank in time."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """Return the end of the last action, in the unit of the durations."""
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    @property
    def bubble(self) -> float:
        """Return the idle share of num_ranks * makespan, from 0 to 1."""
        whole = len(self.ranks) * self.makespan
        busy = sum(span.end - span.start for spans in self.ranks for span in spans)
        return 1.0 - busy / whole if whole else 0.0

    @property
    def peak_live_activations(self) -> tuple[float, ...]:
        """Return each rank's largest number of micro-batches whose activations it holds.

        An activation lives from the start of F to the end of B (of the later of I and W), or of F where
        nothing runs backward. Unit: all layers of the rank, so a chunk of a rank with v chunks counts 1/v.
        """
        return tuple(_peak_live(spans) for spans in self.ranks)


def simulate(plan: Plan | Sequence[Sequence[Action]], durations: Mapping[Kind, float] | None = None) -> Timeline:
    """Play a plan, or one compute list per rank, with communication that takes no time.

    Args:
        plan: a plan, of which the compute actions count, or the lists themselves.
        durations: time of each compute kind, above zero, any unit; None for `UNIT_DURATIONS`.
    Returns: start and end of every compute action; the first starts at 0.
    Raises: ValueError: a duration is missing or not positive, or the lists cannot finish.
    """
    lists = plan.actions if isinstance(plan, Plan) else plan
    compute = [[action for action in actions if action.kind in COMPUTE] for actions in lists]
    lengths = UNIT_DURATIONS if durations is None else durations
    _check_durations(compute, lengths)
    last_chunk = max((action.piece[0] for actions in compute for action in actions), default=0)
    spans: list[list[Span]] = [[] for _ in compute]
    ready_at: dict[_Value, float] = {}
    progress = True
    while progress:
        progress = False
        for actions, done in zip(compute, spans, strict=True):
            while len(done) < len(actions):
                action = actions[len(done)]
                inputs = _inputs(action, last_chunk)
                if any(value not in ready_at for value in inputs):
                    break
                start = max([ready_at[value] for value in inputs] + [done[-1].end if done else 0.0])
                done.append(Span(action, start, start + lengths[action.kind]))
                ready_at[_output(action)] = done[-1].end
                progress = True
    _check_finished(compute, spans, last_chunk, ready_at)
    return Timeline(tuple(tuple(done) for done in spans))


def _inputs(action: Action, last_chunk: int) -> list[_Value]:
    chunk, microbatch = action.piece
    match action.kind:
        case Kind.F:
            return [(Kind.F, chunk - 1, microbatch)] if chunk > 0 else []
        case Kind.W:
            return [(Kind.I, chunk, microbatch)]
    from_next = [(Kind.I, chunk + 1, microbatch)] if chunk < last_chunk else []
    return [(Kind.F, chunk, microbatch), *from_next]


def _output(action: Action) -> _Value:
    return (Kind.I if action.kind in INPUT_GRADIENT else action.kind, *action.piece)


def _peak_live(spans: Sequence[Span]) -> float:
    backwards_left = Counter(span.action.piece for span in spans if span.action.kind in BACKWARD)
    live = peak = 0
    for span in spans:
        if span.action.kind is Kind.F:
            live += 1
            peak = max(peak, live)
        else:
            backwards_left[span.action.piece] -= 1
        if not backwards_left[span.action.piece]:
            live -= 1
    num_chunks = len({span.action.chunk for span in spans})
    return peak / max(num_chunks, 1)


def _check_durations(compute: Sequence[Sequence[Action]], durations: Mapping[Kind, float]) -> None:
    for kind in {action.kind for actions in compute for action in actions}:
        if not durations.get(kind, 0.0) > 0.0:
            raise ValueError(f"every compute kind needs a duration above 0: {kind} has {durations.get(kind)}")


def _check_finished(
    compute: Sequence[Sequence[Action]],
    spans: Sequence[Sequence[Span]],
    last_chunk: int,
    ready_at: Mapping[_Value, float],
) -> None:
    for rank, (actions, done) in enumerate(zip(compute, spans, strict=True)):
        if len(done) < len(actions):
            action = actions[len(done)]
            kind, chunk, microbatch = next(v for v in _inputs(action, last_chunk) if v not in ready_at)
            producer = f"{chunk}{'B' if kind is Kind.I else kind.value}{microbatch}"
            raise ValueError(f"compute lists must finish: rank {rank} waits in {action} for {producer}")
