"""Stages that compute longer than others: because a rank is slow, or because they have more work.

A rank is slow if ranks with the same work are faster: its stage's ranks in other replicas and tensor-parallel places;
or the other stages, by what a layer takes: the model's ends, which only two stages have, were measured apart. What is
left of a difference between stages is work: they are uneven. While other threads run on its core a rank is not slow:
that time is left out, as far as the host says it.
"""

from __future__ import annotations

import statistics

from tpengine.advice.diagnose.baseline import Baseline, Seconds
from tpengine.advice.diagnose.changes import best_change, other_schedules
from tpengine.advice.diagnose.finding import Fault, Finding, percent
from tpengine.plan import Kind
from tpengine.simulate import simulate
from tpengine.simulate.profiles.ranks import RankProfile


def slow_rank(baseline: Baseline) -> Finding | None:
    """Return what it costs that a rank computes longer than others with its work.

    Removed: its actions take what those of the others take, by the lower median.
    """
    by_peers, by_layers = _typical(baseline)
    slowest = [_slowest_with(baseline, rank) for rank in baseline.ranks]
    own = {key: _own_seconds(rank, key) for rank in slowest for key in rank.actions}
    removed = {key: seconds - max(0.0, own[key] - by_layers[key]) for key, seconds in baseline.seconds.items()}
    brings = baseline.brings(baseline.costs_with(removed))
    if brings <= 0.0:
        return None
    # The one that is furthest from what is typical explains it.
    rank = max(slowest, key=lambda rank: _total(own, rank) / _total(by_layers, rank))
    longer = _total(own, rank) / _total(by_layers, rank) - 1.0
    is_by_peers = _total(own, rank) - _total(by_peers, rank) >= _total(by_peers, rank) - _total(by_layers, rank)
    than = "others of its stage" if is_by_peers else "it would with layers as fast as those of other stages"
    others = [other.pp for other in slowest if other.pp != rank.pp]
    waiting = f", the other stages wait {baseline.waits(*others)}" if others else ""
    return Finding(
        Fault.SLOW_RANK,
        brings,
        f"{_name_of(baseline, rank)} computes {percent(longer)} longer than {than}{waiting}",
        "a host and device there as fast as the others'",
        brings,
    )


def uneven_stages(baseline: Baseline) -> Finding | None:
    """Return what it costs that stages have unequal work.

    Removed: every stage takes the mean of all, after what slow ranks take longer has been removed.
    """
    if baseline.plan.num_ranks == 1:
        return None
    _, by_layers = _typical(baseline)
    slowest = {key: _slowest_with(baseline, rank) for rank in baseline.ranks for key in rank.actions}
    kept = {
        key: seconds - max(0.0, _own_seconds(slowest[key], key) - by_layers[key])
        for key, seconds in baseline.seconds.items()
    }
    # Other threads on a rank's core are no work of its stage.
    starved = {key: min(rank.actions[key].starved, kept[key]) for rank in baseline.ranks for key in rank.actions}
    by_stage = [_total(kept, rank) - _total(starved, rank) for rank in baseline.ranks]
    mean = statistics.fmean(by_stage)
    levelled = {
        key: (kept[key] - starved[key]) * mean / by_stage[rank.pp] + starved[key]
        for rank in baseline.ranks
        for key in rank.actions
    }
    with_fault = simulate(baseline.plan, baseline.costs_with(kept)).makespan
    seconds = with_fault - simulate(baseline.plan, baseline.costs_with(levelled)).makespan
    if seconds <= 0.0:
        return None
    stage = by_stage.index(max(by_stage))
    others = [other for other in range(len(by_stage)) if other != stage]
    longer = by_stage[stage] / statistics.fmean(by_stage[other] for other in others) - 1.0
    evidence = f"stage {stage} computes {percent(longer)} longer than the others, who wait {baseline.waits(*others)}"
    found = best_change(baseline, other_schedules(baseline))
    if found is None:
        evidence += "; no other schedule evens it out: choose --model.num-layers that --parallel.pp divides better"
        return Finding(Fault.UNEVEN_STAGES, seconds, evidence, "", 0.0)
    return Finding(Fault.UNEVEN_STAGES, seconds, evidence, found.text(), found.brings)


def _typical(baseline: Baseline) -> tuple[Seconds, Seconds]:
    """Return what actions take without their exchanges: of a stage's typical rank; and no more than by their layers.

    By their layers: those of a stage that takes longer for a layer than the median of all stages take what those do.
    Layers are compared by their flops, which are the same for all but those whose attention sees less far.
    """
    found, layers = {}, {}
    for rank in baseline.ranks:
        alike = [other for other in baseline.evidence.profile.ranks if other.pp == rank.pp]
        for key in rank.actions:
            found[key] = statistics.median_low(_own_seconds(other, key) for other in alike)
            layers[key] = statistics.median_low(_seconds_of_layers(baseline, other, key) for other in alike)
    modelled = {key: seconds.total - seconds.exchange for key, seconds in baseline.modelled_layers.items()}
    ratios = [_total(layers, rank) / _total(modelled, rank) for rank in baseline.ranks]
    median = statistics.median_low(ratios)
    return found, {
        key: found[key] - layers[key] * max(0.0, 1.0 - median / ratios[rank.pp])
        for rank in baseline.ranks
        for key in rank.actions
    }


def _seconds_of_layers(baseline: Baseline, rank: RankProfile, key: tuple[Kind, int]) -> float:
    """Return what an action of a rank takes without the model's ends.

    Where they were not measured, in W and in old profiles, the model says what they are of what was.
    """
    own, (kind, chunk) = _own_seconds(rank, key), key
    ends, starved = rank.actions[key].ends, rank.actions[key].starved
    modelled = {
        of: baseline.modelled[of, chunk].total - baseline.modelled_layers[of, chunk].total for of in (kind, Kind.I)
    }
    if ends is None:
        return own * baseline.modelled_layers[key].total / baseline.modelled[key].total
    if kind is Kind.W and modelled[Kind.I] > 0.0:
        ends = (rank.actions[Kind.I, chunk].ends or 0.0) * modelled[Kind.W] / modelled[Kind.I]
    # The ends stood in line too.
    return max(own - ends * own / (own + starved), 1e-3 * own)


def _slowest_with(baseline: Baseline, rank: RankProfile) -> RankProfile:
    """Return the rank that its tensor-parallel ranks wait for: the one that computes longest itself."""
    together = [other for other in baseline.evidence.profile.ranks if (other.pp, other.dp) == (rank.pp, rank.dp)]
    return max(together, key=lambda other: sum(_own_seconds(other, key) for key in other.actions))


def _own_seconds(rank: RankProfile, key: tuple[Kind, int]) -> float:
    action = rank.actions[key]
    # Whoever waits for other ranks stands in line too.
    starved = max(0.0, action.starved - action.exchange)
    return max(action.seconds - action.exchange - action.reducing - starved, 1e-3 * action.seconds)


def _total(seconds: Seconds, rank: RankProfile) -> float:
    return sum(seconds[key] for key in rank.actions)


def _name_of(baseline: Baseline, rank: RankProfile) -> str:
    """Return a rank's number and its place, where it has more than one coordinate."""
    layout = baseline.evidence.layout
    number = (rank.pp * layout.dp + rank.dp) * layout.tp + rank.tp
    places = [
        f"{axis} {place}"
        for axis, place, size in (
            ("pp", rank.pp, layout.pp),
            ("dp", rank.dp, layout.dp),
            ("tp", rank.tp, layout.tp),
        )
        if size > 1
    ]
    return f"rank {number} ({', '.join(places)})" if places else f"rank {number}"
