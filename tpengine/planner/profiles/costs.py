"""Costs of other plans of a profile's model: other schedules, numbers of micro-batches and of ranks.

A chunk with the same layers as one in the profile costs what that one cost. For other chunks, each kind of action is
fitted over the profile's chunks as

    seconds = layers * seconds of a layer (+ the embedding's, on the first chunk) (+ head's and loss's, on the last)

Three chunks or more determine both ends and the layer. With two, the first chunk is taken to be layers only, since an
embedding is only a lookup. With one, its time is divided among its layers. An end with a negative time counts as 0.
Where only whole backwards were measured, I and W get half each; where only halves were measured, B is their sum. The
time that a rank itself spends on a transfer (`CostProfile.send_seconds`) is added to the action before or after it,
because the simulator's transfers occupy no rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tpengine.plan.actions import COMPUTE, Kind
from tpengine.plan.lower import lower
from tpengine.plan.partition import partition_layers
from tpengine.plan.plan import Bucket, Chunk, Plan, Tie
from tpengine.plan.schedule import Schedule
from tpengine.planner.costs import Costs, spec_bytes
from tpengine.planner.profiles.file import BucketProfile, ChunkProfile, CostProfile


@dataclass(frozen=True)
class LayerFit:
    """Seconds of one layer, and of the model's first and last part."""

    layer: float
    first: float
    last: float

    def of(self, layers: tuple[int, int], num_layers: int) -> float:
        """Return the seconds of a chunk with these layers, of a model with `num_layers`."""
        start, end = layers
        return (end - start) * self.layer + (start == 0) * self.first + (end == num_layers) * self.last

    @classmethod
    def over(cls, chunks: Sequence[tuple[int, float]]) -> LayerFit:
        """Fit (number of layers, seconds) of a model's chunks by least squares, as the module docstring says."""
        ends = {0, len(chunks) - 1} if len(chunks) > 2 else {len(chunks) - 1} if len(chunks) == 2 else set[int]()
        while True:
            # The time of a fitted end absorbs all of its chunk's error, so that chunk says nothing about a layer.
            plain = [chunk for number, chunk in enumerate(chunks) if number not in ends]
            layer = sum(layers * seconds for layers, seconds in plain) / sum(layers * layers for layers, _ in plain)
            rest = {number: chunks[number][1] - chunks[number][0] * layer for number in ends}
            if all(seconds >= 0.0 for seconds in rest.values()):
                return cls(layer, rest.get(0, 0.0), rest.get(len(chunks) - 1, 0.0))
            ends = {number for number in ends if rest[number] >= 0.0}


def costs_for(profile: CostProfile, plan: Plan) -> Costs:
    """Return the costs of a plan of the profile's model, in seconds.

    Args: plan: any schedule, ranks, chunks and number of micro-batches, of the profile's micro-batch size.
    Raises: ValueError: the plan's model has another number of layers.
    """
    if plan.num_layers != profile.num_layers:
        raise ValueError(
            f"a profile predicts plans of its own model: it has {profile.num_layers} layers, the plan "
            f"{plan.num_layers}: profile a run of that model"
        )
    scale = _most_layers(plan.chunks) / _most_layers(profile.chunks)
    num_bytes = 0 if profile.boundary is None else spec_bytes(profile.boundary)
    return Costs(
        compute=_compute(profile, plan),
        # With one tensor size, latency and bandwidth cannot be separated.
        bytes_per_time=num_bytes / profile.link_seconds if profile.link_seconds else math.inf,
        reductions=_of_buckets(profile, plan, lambda bucket: bucket.seconds),
        gathers=_of_buckets(profile, plan, lambda bucket: bucket.gather_seconds),
        ties=profile.ties,
        # Both take time for every element of a rank.
        clip=profile.clip * scale,
        step=profile.step * scale,
    )


def plan_for(profile: CostProfile, schedule: Schedule) -> Plan:
    """Lower a schedule over the profile's model; the plan is not verified.

    Layers are split as in the profile if it has as many chunks on the same ranks, else so that the fitted costs are
    balanced. Each chunk has one bucket if the profile has any, gathered, kept and reduced as those of the profile, and
    the ends share a parameter if the profile's do.
    """
    num_chunks, num_layers = len(schedule.ranks), profile.num_layers
    if schedule.ranks == tuple(chunk.rank for chunk in profile.chunks):
        layers = tuple(chunk.layers for chunk in profile.chunks)
    else:
        fits = _fits(profile)
        both = [fits[Kind.F], fits[Kind.B]]
        layer, first, last = (sum(getattr(fit, name) for fit in both) for name in ("layer", "first", "last"))
        layers = partition_layers([layer] * num_layers, first, last, schedule.ranks)
    if profile.boundary is None and len(set(schedule.ranks)) > 1:
        raise ValueError(
            "transfers are predicted from measured ones: a profile of one stage has none: profile a run with pp 2"
        )
    boundary, end = profile.boundary, num_chunks - 1
    chunks = [
        Chunk(rank, layers[number], boundary if number else None, boundary if number < end else None)
        for number, rank in enumerate(schedule.ranks)
    ]
    # All buckets of a run have their weights alike.
    like = next(iter(profile.buckets.values()), None)
    buckets = [Bucket(number, (number,), like.weights, like.reduced) for number in range(num_chunks) if like]
    ties = [Tie(0, (0, end))] if profile.ties and schedule.ranks[0] != schedule.ranks[end] else []
    return lower(schedule, chunks, buckets, ties, schedule.num_microbatches, num_layers, True, profile.residency)


def _compute(profile: CostProfile, plan: Plan) -> dict[tuple[Kind, int], float]:
    known = {chunk.layers: seconds for chunk, seconds in zip(profile.chunks, _all_kinds(profile), strict=True)}
    fits = _fits(profile)
    found = {}
    for index, chunk in enumerate(plan.chunks):
        for kind in COMPUTE:
            seconds = (
                known[chunk.layers][kind] if chunk.layers in known else fits[kind].of(chunk.layers, plan.num_layers)
            )
            found[kind, index] = seconds + _busy(profile, plan, kind, index)
    return found


def _busy(profile: CostProfile, plan: Plan, kind: Kind, chunk: int) -> float:
    """Return how long a rank is occupied by the transfers around an action."""
    if kind is Kind.W:
        return 0.0
    ahead = 1 if kind is Kind.F else -1

    def crosses(other: int) -> bool:
        return 0 <= other < len(plan.chunks) and plan.chunks[other].rank != plan.chunks[chunk].rank

    return crosses(chunk - ahead) * profile.receive_seconds + crosses(chunk + ahead) * profile.send_seconds


def _of_buckets(profile: CostProfile, plan: Plan, seconds_of: Callable[[BucketProfile], float]) -> dict[int, float]:
    """Return seconds by bucket: as measured for the same chunks, else the bucket's share of its chunks' time."""
    measured = {index: seconds_of(bucket) for index, bucket in profile.buckets.items()}
    same_chunks = [chunk.layers for chunk in plan.chunks] == [chunk.layers for chunk in profile.chunks]
    if same_chunks and {bucket.index: bucket.chunks for bucket in plan.buckets} == {
        index: bucket.chunks for index, bucket in profile.buckets.items()
    }:
        return measured
    of_chunk = [0.0] * len(profile.chunks)
    for index, bucket in profile.buckets.items():
        for chunk in bucket.chunks:
            of_chunk[chunk] += measured[index] / len(bucket.chunks)
    fit = LayerFit.over([(_num_layers(c.layers), s) for c, s in zip(profile.chunks, of_chunk, strict=True)])
    sharing = [sum(chunk in bucket.chunks for bucket in plan.buckets) for chunk in range(len(plan.chunks))]
    return {
        bucket.index: sum(
            fit.of(plan.chunks[chunk].layers, plan.num_layers) / sharing[chunk] for chunk in bucket.chunks
        )
        for bucket in plan.buckets
    }


def _all_kinds(profile: CostProfile) -> list[dict[Kind, float]]:
    """Return the seconds of F, B, I and W of each chunk; kinds that did not run are derived from those that did."""
    halves = [chunk.seconds for chunk in profile.chunks if Kind.W in chunk.seconds]
    inputs, weights = (sum(seconds[kind] for seconds in halves) for kind in (Kind.I, Kind.W))
    share = inputs / (inputs + weights) if halves else 0.5
    return [_completed(chunk, share) for chunk in profile.chunks]


def _completed(chunk: ChunkProfile, share: float) -> dict[Kind, float]:
    seconds = dict(chunk.seconds)
    if Kind.B not in seconds:
        seconds[Kind.B] = seconds[Kind.I] + seconds[Kind.W]
    if Kind.W not in seconds:
        seconds |= {Kind.I: seconds[Kind.B] * share, Kind.W: seconds[Kind.B] * (1.0 - share)}
    return seconds


def _fits(profile: CostProfile) -> dict[Kind, LayerFit]:
    layers = [_num_layers(chunk.layers) for chunk in profile.chunks]
    seconds = _all_kinds(profile)
    return {kind: LayerFit.over([(n, s[kind]) for n, s in zip(layers, seconds, strict=True)]) for kind in COMPUTE}


def _num_layers(layers: tuple[int, int]) -> int:
    return layers[1] - layers[0]


def _most_layers(chunks: Sequence[Chunk] | Sequence[ChunkProfile]) -> int:
    ranks = {chunk.rank for chunk in chunks}
    return max(sum(_num_layers(chunk.layers) for chunk in chunks if chunk.rank == rank) for rank in ranks)
