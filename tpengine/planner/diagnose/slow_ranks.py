"""Stages that compute longer than others: because a rank is slow, or because they have more work.

A rank is slow if ranks with the same work are faster: its stage's ranks in other replicas and tensor-parallel places;
or the other stages, by what a layer takes: the model's ends, which only two stages have, were measured apart. What is
left of a difference between stages is work: they are uneven. While other threads run on its core a rank is not slow:
that time is left out, as far as the host says it.

Two more reasons are here: the host's part of a step (reading its text, and starting what a GPU computes), and the
bubble of a pipeline that has too few micro-batches, so that it fills and drains for a large part of the step.
"""

from __future__ import annotations

import statistics

from tpengine.plan import SCHEDULES, Kind, lower, make_schedule, verify
from tpengine.planner import simulate
from tpengine.planner.diagnose.changes import best_change, costs_of_part, evaluated, larger_batch, other_schedules
from tpengine.planner.diagnose.evidence import Baseline, Fault, Finding, Seconds, percent, seconds_text
from tpengine.planner.profiles.ranks import RankProfile

# A GPU that computes longer than its host takes to start it falls behind, and the host is done well before it.
_KEEPS_UP = 0.95
# A micro-batch is split into at most this many: of smaller ones nothing says that their time is a part of it.
_MOST_SPLITS = 16
# A split must bring at least this share of the step: a bubble of some 15 % is as planned. Smaller micro-batches cost
# what no profile of larger ones shows.
_LEAST_SPLIT = 0.08


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


def slow_input(baseline: Baseline) -> Finding | None:
    """Return what it costs that a text is read too slowly: every rank waits for the slowest before its first action.

    A thread reads while steps compute. Removed: what is left to wait for. It lies before the plan.
    """
    ranks = baseline.evidence.profile.ranks
    reads = [rank.read for rank in ranks]
    slowest = reads.index(max(reads))
    if reads[slowest] <= 0.0:
        return None
    place = ranks[slowest]
    first = baseline.plan.actions[place.pp][0]
    evidence = (
        f"rank {slowest} reads its micro-batches slower than steps take them: it waits {seconds_text(reads[slowest])} "
        f"of {seconds_text(baseline.step)} for them before {first}, and all ranks wait for it"
    )
    return Finding(
        Fault.SLOW_INPUT,
        reads[slowest],
        evidence,
        "the file of --data.path on a disk of that host that is as fast as memory",
        reads[slowest],
    )


def host_bound(baseline: Baseline) -> Finding | None:
    """Return what it costs that a GPU waits for the host to start its kernels.

    Removed: half of the starts, with micro-batches of twice the size, whose actions take the host as long as before.
    What a GPU computes then takes at least as long as it does now, so this is the most that the change brings.
    """
    config, train = baseline.evidence.config, baseline.evidence.config.train
    issue = {key: action.issue for rank in baseline.ranks for key, action in rank.actions.items()}
    device, host = sum(baseline.seconds.values()), sum(issue.values())
    if config.device != "cuda" or host < _KEEPS_UP * device or train.num_micro_batches % 2:
        return None
    settings = {
        "num_micro_batches": train.num_micro_batches // 2,
        "micro_batch_size": train.micro_batch_size * 2,
    }
    found = evaluated(baseline, settings, settings, {key: seconds / 2 for key, seconds in baseline.seconds.items()})
    if found is None or found.brings <= 0.0:
        return None
    evidence = (
        f"the host takes {percent(host / device)} of the time of F and B to start them, so that the GPU never has work "
        "in advance"
    )
    return Finding(Fault.HOST, found.brings, evidence, f"{found.text()} at most", found.brings)


def few_micro_batches(baseline: Baseline) -> Finding | None:
    """Return what it costs that the pipeline fills and drains with so few micro-batches.

    Removed: micro-batches are split in two, and again for as long as another split brings more than the floor, and
    than 8 %. A bubble that no split shortens by so much is as planned.
    """
    # A schedule from a file says how many micro-batches it is for.
    if baseline.plan.num_ranks == 1 or baseline.evidence.config.parallel.schedule not in SCHEDULES:
        return None
    brought, splits, least = 0.0, 1, max(baseline.floor, _LEAST_SPLIT) * baseline.step
    while splits < _MOST_SPLITS:
        more = _brings_split(baseline, splits * 2)
        if more - brought <= least:
            break
        brought, splits = more, splits * 2
    if splits == 1:
        return None
    train = baseline.evidence.config.train
    evidence = (
        f"{train.num_micro_batches} micro-batches on {baseline.plan.num_ranks} stages of {baseline.plan.schedule} "
        f"leave a bubble of {percent(baseline.bubble)}, a stage waits "
        f"{baseline.waits(*range(baseline.plan.num_ranks))}"
    )
    numbers = [number for number in (2, 4, 8, 16) if number <= splits and train.micro_batch_size % number == 0]
    smaller = [
        {"num_micro_batches": train.num_micro_batches * n, "micro_batch_size": train.micro_batch_size // n}
        for n in numbers
    ]
    found = best_change(baseline, smaller + other_schedules(baseline))
    change, brings = (found.text(), found.brings) if found else larger_batch(baseline, splits) or ("", 0.0)
    return Finding(Fault.FEW_MICRO_BATCHES, brought, evidence, change, brings)


def _brings_split(baseline: Baseline, splits: int) -> float:
    """Return what it brings to split every micro-batch so many ways, whether its sequences can be split or not."""
    plan, parallel = baseline.plan, baseline.evidence.config.parallel
    schedule = make_schedule(
        parallel.schedule, plan.num_ranks, plan.num_microbatches * splits, parallel.chunks_per_rank
    )
    split = lower(
        schedule,
        plan.chunks,
        plan.buckets,
        plan.ties,
        plan.num_microbatches * splits,
        plan.num_layers,
        True,
        baseline.evidence.layout.residency,
        plan.counts,
    )
    verify(split)
    return baseline.timeline.makespan - simulate(split, costs_of_part(baseline, split, 1.0 / splits)).makespan
