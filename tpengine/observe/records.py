"""Measured steps: what the ranks of a pipeline recorded while a plan ran, as a timeline like a simulated one.

Each rank records what it can see, on its own clock (`RankRecord`). On one clock the records show more: a rank blocked
in CLIP waits for the slowest rank, and communication is under way

    transfers    in a process group: from when both sides have posted until the receiver has the tensor. Through a
                 mailbox: on the sender while it copies in, on the receiver while it copies out, or from the beginning
                 of the sender's copy if the receiver is waiting for it
    reductions   from when this rank began until the sum was there; gathers of weights alike

Where no rank sees the end, there is a bound: communication that was complete when a rank asked for it ended then, at
the latest. The ranks of one host share a clock; the clocks of several hosts are aligned by meetings (`clock_offsets`).
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tpengine.config import Config
from tpengine.layout.step_plan import Layout
from tpengine.plan.actions import COMPUTE, RECEIVES, SENDS, TRANSFERS, Action, Kind, counterpart, parse_action
from tpengine.plan.clock import RankTimeline, Span, Timeline
from tpengine.plan.plan import Plan

# Actions in which every member waits for the last one.
MEETINGS = frozenset({Kind.TIE_REDUCE, Kind.CLIP})
_BUSY = COMPUTE | MEETINGS | {Kind.STEP}


class Ran(NamedTuple):
    """An action of the list, as it ran."""

    action: Action
    begin_ns: int
    end_ns: int


class Waited(NamedTuple):
    """One entry of a WAIT: when the rank asked for it, when it was there, whether it was there at once, and when it was
    complete, if that is known.
    """

    begin_ns: int
    end_ns: int
    was_complete: bool
    done_ns: int | None


@dataclass(frozen=True)
class RankRecord:
    """One rank's step, in nanoseconds on a clock that all ranks share.

    Attributes:
        ran: every action of the rank's list, in order.
        starts: by reduction or gather, when it began, as often as it did.
        waited: by transfer, reduction or gather, as often as it was waited for; by the rank's first F, how it waited
            for its samples before the list began.
        copies: whether posting a send and waiting for a receive copy the data (mailbox), or only start and end it.
    """

    ran: tuple[Ran, ...]
    starts: Mapping[Action, Sequence[int]]
    waited: Mapping[Action, Sequence[Waited]]
    copies: bool


# The records of a pipeline's ranks, by stage.
PipelineRecord: TypeAlias = Sequence[RankRecord]


@dataclass(frozen=True)
class MeasuredStep:
    """A step that all ranks have recorded.

    Attributes:
        step: its number in the run.
        seconds: from its beginning to its end, including what is outside the plan.
        pipelines: the records of every pipeline: one per data-parallel replica and tensor-parallel rank.
    """

    step: int
    seconds: float
    pipelines: tuple[PipelineRecord, ...]


@dataclass(frozen=True)
class Recording:
    """The steps that a run has recorded, of one phase, with what its ranks are: for whoever writes and draws them.

    Attributes:
        config, layout, plan: of the phase.
        steps: at least one.
        device: where ranks compute, cpu or cuda.
        places: (pp, dp, tp) of each rank.
        held: of each rank, the bytes of its arenas, and the most that it has held so far.
        metered: of each rank, `Meter.figures`.
        run_dir: where files go.
        say: takes lines for the user; None of steps that the run has chosen by itself: nothing is said of those, and
            no copies are kept.
    """

    config: Config
    layout: Layout
    plan: Plan
    steps: Sequence[MeasuredStep]
    device: str
    places: Sequence[tuple[int, int, int]]
    held: Sequence[tuple[int, int]]
    metered: Sequence[Mapping[str, Any]]
    run_dir: Path
    say: Callable[[str], None] | None


def encode_record(
    ran: Sequence[tuple[str, int, int]],
    waited: Sequence[tuple[str, int, int, bool, int | None]],
    copies: bool,
) -> bytes:
    """Return what a rank recorded as JSON, for `decode_record`.

    Args:
        ran: text, begin and end of each action; a sub-action that was started by an action follows it.
        waited: text and the fields of `Waited`.
        copies: as in RankRecord.
    """
    return json.dumps({"ran": ran, "waited": waited, "copies": copies}, separators=(",", ":")).encode()


def decode_record(encoded: bytes, actions: Sequence[Action], offset_ns: int = 0) -> RankRecord:
    """Return what a rank recorded while it ran its list of a plan.

    Args:
        encoded: from `encode_record`.
        actions: the rank's list.
        offset_ns: by how much the rank's clock is ahead.
    Raises: ValueError: what ran is not the list, which is a bug.
    """
    content = json.loads(encoded)
    events = iter(content["ran"])
    ran: list[Ran] = []
    starts: defaultdict[Action, list[int]] = defaultdict(list)
    for action in actions:
        text, begin, end = next(events, ("the end", 0, 0))
        _check_same(text, action)
        ran.append(Ran(action, begin - offset_ns, end - offset_ns))
        # Counts are reduced by an action of their own.
        if action.kind in (Kind.GATHER, Kind.REDUCE):
            starts[action].append(begin - offset_ns)
        for sub in action.posts if action.kind in COMPUTE else ():
            text, begin, _ = next(events, ("the end", 0, 0))
            _check_same(text, sub)
            starts[sub].append(begin - offset_ns)
    text, _, _ = next(events, ("", 0, 0))
    _check_same(text, None)
    waited: defaultdict[Action, list[Waited]] = defaultdict(list)
    for text, begin, end, complete, done in content["waited"]:
        done = None if done is None else done - offset_ns
        waited[parse_action(text)].append(Waited(begin - offset_ns, end - offset_ns, complete, done))
    return RankRecord(tuple(ran), starts, waited, content["copies"])


def clock_offsets(hosts: Sequence[int], readings: Sequence[Sequence[int]]) -> list[int]:
    """Return by how much each rank's clock is ahead of rank 0's.

    Args:
        hosts: the host of each rank; the ranks of one host share its clock.
        readings: by rank, its clock when it left each of several meetings of all ranks.
    Returns: one value per host, repeated for its ranks: the median over the meetings of how much later the first of its
        ranks left than the first rank of rank 0's host.
    """
    first_of = {
        host: [
            min(values) for values in zip(*(r for h, r in zip(hosts, readings, strict=True) if h == host), strict=True)
        ]
        for host in set(hosts)
    }
    reference = first_of[hosts[0]]
    ahead = {
        host: round(statistics.median(value - zero for value, zero in zip(first, reference, strict=True)))
        for host, first in first_of.items()
    }
    return [ahead[host] for host in hosts]


def origin_of(pipelines: Sequence[PipelineRecord]) -> int:
    """Return when the first action of any rank began."""
    return min(record.ran[0].begin_ns for pipeline in pipelines for record in pipeline)


def beginning_of(pipelines: Sequence[PipelineRecord]) -> int:
    """Return when any rank began to wait for its samples, or else for the first action of any rank."""
    waits = [wait.begin_ns for pipeline in pipelines for record in pipeline for _, wait in input_waits(record)]
    return min([origin_of(pipelines), *waits])


def input_waits(record: RankRecord) -> list[tuple[Action, Waited]]:
    """Return the first F and how it waited for its samples; nothing of a rank that needs none."""
    return [(action, wait) for action, waits in record.waited.items() if action.kind is Kind.F for wait in waits]


def computed_until(pipeline: PipelineRecord) -> int:
    """Return when a pipeline's last forward or backward ended; what follows may wait for other pipelines."""
    return max(ran.end_ns for record in pipeline for ran in record.ran if ran.action.kind in COMPUTE)


def measured_timeline(plan: Plan, pipeline: PipelineRecord, origin_ns: int | None = None) -> Timeline:
    """Return one timeline from the records of a pipeline's ranks.

    Args:
        plan: what ran.
        pipeline: the ranks' records.
        origin_ns: the time that becomes 0; default the beginning of the first action.
    Returns: seconds; without memory, which follows from it (memory.py), and without a critical path.
    """
    return _Join(plan, pipeline, origin_of([pipeline]) if origin_ns is None else origin_ns).timeline()


class _Join:
    """Combines what the ranks recorded."""

    def __init__(self, plan: Plan, pipeline: PipelineRecord, origin_ns: int) -> None:
        self.plan, self.pipeline, self.origin_ns = plan, pipeline, origin_ns
        self.posts = [posts_of(record) for record in pipeline]
        self.last_arrivals: dict[Action, int] = {}
        for record in pipeline:
            for ran in record.ran:
                if ran.action.kind in MEETINGS:
                    self.last_arrivals[ran.action] = max(self.last_arrivals.get(ran.action, 0), ran.begin_ns)

    def timeline(self) -> Timeline:
        return Timeline(tuple(self._rank(rank) for rank in range(self.plan.num_ranks)))

    def _rank(self, rank: int) -> RankTimeline:
        record = self.pipeline[rank]
        compute, waits = [], []
        for action, begin, end in record.ran:
            if action.kind is Kind.WAIT:
                waits.append(self._span(action, begin, end))
            elif action.kind in _BUSY:
                all_there = min(max(self.last_arrivals.get(action, begin), begin), end)
                if all_there > begin:
                    waits.append(self._span(action, begin, all_there))
                compute.append(self._span(action, all_there, end))
        # Reading lies before the list; it is shown where the timeline begins that early.
        for action, wait in input_waits(record):
            if wait.begin_ns >= self.origin_ns and wait.end_ns > wait.begin_ns:
                waits.insert(0, self._span(action, wait.begin_ns, wait.end_ns))
        transfers = list(self._transfers(rank))
        buckets = [self._span(run.action, run.begin_ns, run.end_ns) for run in bucket_runs(record)]
        return RankTimeline(
            compute=tuple(compute),
            sends=_by_start(span for span in transfers if span.action.kind in SENDS),
            receives=_by_start(span for span in transfers if span.action.kind in RECEIVES),
            reductions=_by_start(span for span in buckets if span.action.kind is Kind.REDUCE),
            gathers=_by_start(span for span in buckets if span.action.kind is Kind.GATHER),
            waits=tuple(waits),
        )

    def _transfers(self, rank: int) -> Iterator[Span]:
        for action, own in self.posts[rank].items():
            peer = self.plan.peer(action)
            theirs = self.posts[peer][counterpart(action)]
            if action.kind in SENDS:
                yield self._span(action, *_transfer_times(own, theirs, self.pipeline[peer], is_send=True))
            else:
                yield self._span(action, *_transfer_times(theirs, own, self.pipeline[rank], is_send=False))

    def _span(self, action: Action, begin_ns: int, end_ns: int) -> Span:
        return Span(action, (begin_ns - self.origin_ns) * 1e-9, (end_ns - self.origin_ns) * 1e-9)


def _transfer_times(send: Ran, receive: Ran, receiver: RankRecord, is_send: bool) -> tuple[int, int]:
    """Return when a transfer began and ended, as one of its sides shows it."""
    (waited,) = receiver.waited[receive.action]
    if receiver.copies:
        if is_send:
            return send.begin_ns, send.end_ns
        return waited.begin_ns if waited.was_complete else max(send.begin_ns, receive.begin_ns), waited.end_ns
    end = waited.begin_ns if waited.was_complete else waited.end_ns
    return min(max(send.begin_ns, receive.begin_ns), end), end


def posts_of(record: RankRecord) -> dict[Action, Ran]:
    """Return, by transfer, the span of its posting."""
    return {ran.action: ran for ran in record.ran if ran.action.kind in TRANSFERS}


def metered_name(kind: Kind, chunk: int) -> str:
    """Return the name of all actions of a kind and chunk: 2F."""
    return f"{chunk}{kind.value}"


class BucketRun(NamedTuple):
    """A reduction or a gather, as it ran.

    Attributes:
        action: which.
        begin_ns, end_ns: when it began; when it ended, at the latest.
        is_known: whether that is when it ended.
    """

    action: Action
    begin_ns: int
    end_ns: int
    is_known: bool


def bucket_runs(record: RankRecord) -> list[BucketRun]:
    """Return a rank's reductions and gathers, in the order in which they began."""
    runs = []
    for action, begins in record.starts.items():
        for begin, waited in zip(begins, record.waited[action], strict=True):
            end = waited.done_ns
            if end is None:
                end = waited.begin_ns if waited.was_complete else waited.end_ns
            is_known = waited.done_ns is not None or not waited.was_complete
            runs.append(BucketRun(action, begin, max(end, begin), is_known))
    # They are one stream: of those that one action begins, the first ends first.
    return sorted(runs, key=lambda run: (run.begin_ns, run.end_ns))


def _by_start(spans: Iterator[Span]) -> tuple[Span, ...]:
    return tuple(sorted(spans, key=lambda span: span.start))


def _check_same(text: str, action: Action | None) -> None:
    wanted = "" if action is None else str(action)
    if text != wanted:
        raise ValueError(f"what ran must be the plan's list: got {text or 'nothing'}, the list has {wanted or 'ended'}")
