"""From the records of measured steps to a profile: what each kind of action costs.

Costs are medians over steps, micro-batches and replicas, so that a single interrupt does not change them. Transfers
occupy a rank too: with posting, and through a mailbox with the copies. That time is measured separately from the rest
of a transfer, because the rest can be hidden behind computation.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tpengine.observe.records import (
    BucketRun,
    MeasuredStep,
    PipelineRecord,
    RankRecord,
    bucket_runs,
    measured_timeline,
    metered_name,
    posts_of,
)
from tpengine.plan.actions import COMPUTE, RECEIVES, SENDS, Action, Kind, counterpart
from tpengine.plan.plan import Bucket, Plan, Residency, Weights
from tpengine.planner.profiles.file import BucketProfile, ChunkProfile, CostProfile
from tpengine.planner.profiles.ranks import ActionProfile, RankProfile, StepSeconds


def profile_of(
    plan: Plan,
    steps: Sequence[MeasuredStep],
    bucket_bytes: Mapping[int, int],
    residency: Residency = Residency.STEP,
) -> CostProfile:
    """Return what the actions of a plan cost, measured.

    Args:
        plan: what ran in every pipeline.
        steps: at least one.
        bucket_bytes: by bucket index.
        residency: that the plan was lowered with.
    """
    pipelines = [pipeline for step in steps for pipeline in step.pipelines]
    timelines = [measured_timeline(plan, pipeline) for pipeline in pipelines]
    compute: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
    ending: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
    for timeline in timelines:
        for rank, lanes in enumerate(timeline.ranks):
            for span in lanes.compute:
                if span.action.kind in COMPUTE:
                    compute[span.action.kind, span.action.piece[0]].append(span.duration)
                else:
                    ending[span.action.kind, rank].append(span.duration)

    def slowest(kind: Kind) -> float:
        return max((_median(found) for (of_kind, _), found in ending.items() if of_kind is kind), default=0.0)

    lengths = [
        max(timelines[number].makespan for number in range(first, first + len(step.pipelines)))
        for first, step in zip(range(0, len(pipelines), len(steps[0].pipelines)), steps, strict=True)
    ]
    send, receive, link = _transfer_seconds(plan, pipelines)
    return CostProfile(
        schedule=plan.schedule,
        num_microbatches=plan.num_microbatches,
        chunks=tuple(
            ChunkProfile(
                chunk.rank,
                chunk.layers,
                {kind: _median(found) for (kind, of_chunk), found in compute.items() if of_chunk == index},
            )
            for index, chunk in enumerate(plan.chunks)
        ),
        boundary=plan.chunks[0].output,
        send_seconds=send,
        receive_seconds=receive,
        link_seconds=link,
        buckets={
            bucket.index: BucketProfile(
                bucket.chunks,
                _bucket_seconds(plan, bucket, Kind.REDUCE, steps),
                bucket_bytes.get(bucket.index, 0),
                0.0 if bucket.weights is Weights.WHOLE else _bucket_seconds(plan, bucket, Kind.GATHER, steps),
                bucket.weights,
                bucket.reduced,
            )
            for bucket in plan.buckets
        },
        ties=slowest(Kind.TIE_REDUCE),
        clip=slowest(Kind.CLIP),
        step=slowest(Kind.STEP),
        plan_seconds=_median(lengths),
        outside_seconds=_median([max(0.0, step.seconds - length) for step, length in zip(steps, lengths, strict=True)]),
        residency=residency,
    )


def ranks_of(
    steps: Sequence[MeasuredStep], places: Sequence[tuple[int, int, int]], metered: Sequence[Mapping[str, Any]]
) -> tuple[RankProfile, ...]:
    """Return what each rank of the run did: by its trace, and by its host (runs/meter.py).

    Args:
        steps: at least one; their pipelines are ordered by dp, then tp.
        places: (pp, dp, tp) of each rank.
        metered: by rank, `Meter.figures`.
    """
    num_tp = max(tp for _, _, tp in places) + 1
    found = []
    for (pp, dp, tp), of_host in zip(places, metered, strict=True):
        actions = {}
        for (kind, chunk), seconds in _action_seconds(steps, dp * num_tp + tp, pp).items():
            issue, exchange, reducing, ends, starved = of_host["actions"][metered_name(kind, chunk)]
            # Medians of several clocks: the parts are no more than the whole.
            exchange = min(exchange, issue)
            reducing = min(reducing, issue - exchange)
            ends, starved = min(ends, seconds), min(starved, issue)
            actions[kind, chunk] = ActionProfile(seconds, issue, exchange, reducing, ends, starved)
        found.append(RankProfile(pp, dp, tp, actions, of_host["read"], of_host["reduced"], of_host["retries"]))
    return tuple(found)


def step_seconds(plan: Plan, steps: Sequence[MeasuredStep]) -> tuple[StepSeconds, ...]:
    """Return the time of each step, and that of its plan in the pipeline that took longest."""
    found = []
    for step in steps:
        length = max(measured_timeline(plan, pipeline).makespan for pipeline in step.pipelines)
        # On a GPU the plan's time is that of its events, the step's that of the host, which may be a little less.
        found.append(StepSeconds(step.step, max(step.seconds, length), length))
    return tuple(found)


def _action_seconds(steps: Sequence[MeasuredStep], pipeline: int, stage: int) -> dict[tuple[Kind, int], float]:
    found: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
    for step in steps:
        for action, begin, end in step.pipelines[pipeline][stage].ran:
            if action.kind in COMPUTE:
                found[action.kind, action.piece[0]].append((end - begin) * 1e-9)
    return {name: _median(values) for name, values in found.items()}


def _transfer_seconds(plan: Plan, pipelines: Iterable[PipelineRecord]) -> tuple[float, float, float]:
    """Return how long a transfer occupies its sender, how long its receiver, and how long the rest takes.

    The rest can only be measured if the receiver is waiting: from when both sides have posted until the tensor has
    arrived. If no receiver ever waits, it is hidden and counted as 0.
    """
    sending, receiving, under_way = [], [], []
    copies = False
    for pipeline in pipelines:
        posts = [posts_of(record) for record in pipeline]
        for rank, record in enumerate(pipeline):
            copies = record.copies
            for action, begin, end in record.ran:
                if action.kind in SENDS:
                    sending.append(float(end - begin))
            for action, entries in record.waited.items():
                if action.kind not in RECEIVES:
                    continue
                (waited,) = entries
                if waited.was_complete:
                    receiving.append(float(waited.end_ns - waited.begin_ns))
                else:
                    sent = posts[plan.peer(action)][counterpart(action)]
                    under_way.append(float(waited.end_ns - max(sent.end_ns, posts[rank][action].end_ns)))
    send, receive, link = (_median(found) * 1e-9 for found in (sending, receiving, under_way))
    if not receiving and copies:
        # No receive was measured: it is the same copy in the other direction.
        receive = send
    return send, receive, max(0.0, link - receive)


def _bucket_seconds(plan: Plan, bucket: Bucket, kind: Kind, steps: Sequence[MeasuredStep]) -> float:
    """Return how long a reduction or gather takes, once all its ranks have begun it and have ended the one before."""
    rank = plan.chunks[bucket.chunks[0]].rank
    action = Action(kind, index=bucket.index)
    measured: list[float] = []
    bounds: list[float] = []
    for step in steps:
        for alike in zip(*(_runs_alone(pipeline[rank], action) for pipeline in step.pipelines), strict=True):
            begin, end = max(run.begin_ns for run in alike), max(run.end_ns for run in alike)
            seconds = max(0, end - begin) * 1e-9
            (measured if all(run.is_known for run in alike) else bounds).append(seconds)
    return _median(measured) if measured else min(bounds)


def _runs_alone(record: RankRecord, action: Action) -> list[BucketRun]:
    """Return each run of a reduction or gather, from when it began, or from the end of what was before it if later."""
    found, until = [], 0
    for run in bucket_runs(record):
        if run.action == action:
            found.append(run._replace(begin_ns=max(run.begin_ns, until)))
        until = max(until, run.end_ns)
    return found


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
