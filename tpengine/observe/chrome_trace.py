"""Measured steps in the trace event format of Chrome, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

A process is a rank. Its threads are the rank's compute, and its sends, receives and reductions under way. All names are
the plan's actions. The first thread shows the rank's whole list, including posts and waits, and inside a wait what it
waited for. Communication that overlaps gets several threads, because the spans of one thread must nest.

Source: "Trace Event Format", Google, the JSON object form with complete ("X") and metadata ("M") events.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tpengine.observe.records import RankRecord, input_waits
from tpengine.plan.actions import Action, Kind
from tpengine.plan.clock import RankTimeline, Span

_COMPUTE = "compute"
_LANES = ("sends", "receives", "gathers", "reductions")
# Distance between the first thread numbers of two lanes: no rank has so many things under way at once.
_LANE_THREADS = 1000


@dataclass(frozen=True)
class TracedStep:
    """A step of a rank: its number, from 1; its record, and the rank's part of the measured timeline."""

    step: int
    record: RankRecord
    timeline: RankTimeline


@dataclass(frozen=True)
class TracedRank:
    """A rank of the run, its displayed name, and its steps in order."""

    rank: int
    name: str
    steps: Sequence[TracedStep]


def chrome_trace(ranks: Sequence[TracedRank], origin_ns: int) -> bytes:
    """Return the trace as JSON.

    Args:
        ranks: all ranks of the run, or some.
        origin_ns: the time that is 0 in the timelines.
    Returns: JSON; times in microseconds.
    """
    events = [event for rank in ranks for event in _events(rank, origin_ns)]
    content = {"displayTimeUnit": "ms", "traceEvents": events}
    return json.dumps(content, separators=(",", ":")).encode()


def _events(rank: TracedRank, origin_ns: int) -> Iterator[dict[str, Any]]:
    yield _name(rank.rank, 0, "process", rank.name)
    yield {"ph": "M", "name": "process_sort_index", "pid": rank.rank, "tid": 0, "args": {"sort_index": rank.rank}}
    yield from _thread(rank.rank, 0, _COMPUTE)
    for traced in rank.steps:
        yield from _list_of(rank.rank, traced, origin_ns)
    for place, lane in enumerate(_LANES):
        first = 1 + place * _LANE_THREADS
        threads = _threads(rank.steps, lane)
        # An empty lane gets a thread too: it shows that there was no such communication.
        for number in range(max(len(threads), 1)):
            yield from _thread(rank.rank, first + number, lane if number == 0 else f"{lane} {number + 1}")
        for number, spans in enumerate(threads):
            for step, span in spans:
                times = span.start * 1e6, span.duration * 1e6
                yield _span(rank.rank, first + number, span.action, *times, step)


def _list_of(rank: int, traced: TracedStep, origin_ns: int) -> Iterator[dict[str, Any]]:
    """Yield a rank's list as it ran, each wait followed by what it waited for."""
    times_waited: Counter[Action] = Counter()
    for action, waited in input_waits(traced.record):
        times = (waited.begin_ns - origin_ns) * 1e-3, (waited.end_ns - waited.begin_ns) * 1e-3
        yield _span(rank, 0, action, *times, traced.step, {"waits_for": "samples", "was_complete": waited.was_complete})
    for action, begin, end in traced.record.ran:
        yield _span(rank, 0, action, (begin - origin_ns) * 1e-3, (end - begin) * 1e-3, traced.step)
        for sub in action.subs if action.kind is Kind.WAIT else ():
            waited = traced.record.waited[sub][times_waited[sub]]
            times_waited[sub] += 1
            times = (waited.begin_ns - origin_ns) * 1e-3, (waited.end_ns - waited.begin_ns) * 1e-3
            yield _span(rank, 0, sub, *times, traced.step, {"was_complete": waited.was_complete})


def _threads(steps: Sequence[TracedStep], lane: str) -> list[list[tuple[int, Span]]]:
    """Assign a lane's spans to as few threads as possible without overlap: each to the first free one."""
    threads: list[list[tuple[int, Span]]] = []
    for traced in steps:
        spans: tuple[Span, ...] = getattr(traced.timeline, lane)
        for span in spans:
            free = next((thread for thread in threads if thread[-1][1].end <= span.start), None)
            if free is None:
                free = []
                threads.append(free)
            free.append((traced.step, span))
    return threads


def _span(
    rank: int, thread: int, action: Action, begin: float, duration: float, step: int, more: dict[str, Any] | None = None
) -> dict[str, Any]:
    fields = {"chunk": action.chunk, "micro_batch": action.microbatch, "index": action.index}
    arguments = {"step": step, **{name: value for name, value in fields.items() if value is not None}, **(more or {})}
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.kind.name,
        "pid": rank,
        "tid": thread,
        # Nanoseconds: the clock has no more digits.
        "ts": round(begin, 3),
        "dur": round(duration, 3),
        "args": arguments,
    }


def _thread(rank: int, thread: int, name: str) -> Iterator[dict[str, Any]]:
    yield _name(rank, thread, "thread", name)
    yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": {"sort_index": thread}}


def _name(rank: int, thread: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": rank, "tid": thread, "args": {"name": name}}
