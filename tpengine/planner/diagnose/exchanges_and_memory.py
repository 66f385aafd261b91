"""Two reasons why a step takes long: exposed communication, and a lack of memory.

Communication that computation does not hide is between tensor-parallel ranks, or between data-parallel replicas. For
want of memory a run computes again, gathers again, or has an allocator that asks again.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tpengine.config.rules import ZERO_OF_SLICED_WEIGHTS
from tpengine.plan import Kind, Recompute, Residency
from tpengine.planner.diagnose.changes import Change, best_change, best_of, evaluated, larger_batch
from tpengine.planner.diagnose.evidence import Baseline, Fault, Finding, Seconds, percent, seconds_text
from tpengine.planner.modelled.costs import action_seconds

# Buckets of a chunk: with more of them each is small, and the start of a collective counts.
_MOST_BUCKETS = 16
_LEAST_BUCKET_BYTES = 1_000
# Backward keeps a part of its time, whatever the model says of what it computes again.
_MOST_AGAIN = 0.9


def exposed_tp(baseline: Baseline) -> Finding | None:
    """Return what exchanges between tensor-parallel ranks cost.

    Removed: the exchanges of every action. Where they were measured, what the rank of a group waited that waited least:
    the others waited for it too. Elsewhere the model's.
    """
    layout = baseline.evidence.layout
    if layout.tp == 1:
        return None
    exchanges, source = _exchanges(baseline)
    removed = {key: seconds - exchanges[key] for key, seconds in baseline.seconds.items()}
    brings = baseline.brings(baseline.costs_with(removed))
    if brings <= 0.0:
        return None
    worst = max(exchanges, key=lambda key: exchanges[key] / baseline.seconds[key])
    share = exchanges[worst] / baseline.seconds[worst]
    evidence = (
        f"ranks of tp {layout.tp} wait for each other in {percent(share)} of {worst[1]}{worst[0]} "
        f"({seconds_text(exchanges[worst])} of {seconds_text(baseline.seconds[worst])}, {source})"
    )
    fused = best_change(baseline, [{"tp_comm": "fused"}], removed)
    if fused is not None and baseline.evidence.config.parallel.tp_comm == "plain":
        # What the fused matmuls hide at most: they compute while they exchange.
        return Finding(Fault.EXPOSED_TP, brings, evidence, f"{fused.text()}, which hides at most all of it,", brings)
    fewer = _fewer_tp(baseline, removed)
    change, brought = ("", 0.0) if fewer is None else fewer
    return Finding(Fault.EXPOSED_TP, brings, evidence, change, brought)


def _exchanges(baseline: Baseline) -> tuple[Seconds, str]:
    """Return the exchanges of each action of the pipeline, and whether they were measured."""
    found: dict[tuple[Kind, int], float] = {}
    for rank in baseline.ranks:
        group = [r for r in baseline.evidence.profile.ranks if (r.pp, r.dp) == (rank.pp, rank.dp)]
        found |= {key: min(member.actions[key].exchange for member in group) for key in rank.actions}
    if any(found.values()):
        return found, "measured"
    modelled = {
        key: min(seconds.exchange, baseline.seconds[key] / 2)
        for key, seconds in baseline.modelled.items()
        if key in baseline.seconds
    }
    return modelled, "by the model"


def _fewer_tp(baseline: Baseline, without_exchanges: Seconds) -> tuple[str, float] | None:
    """Return half as many tensor-parallel ranks and twice as many replicas: flags, and what that brings.

    An action then has twice the work and at most the exchanges that it had; a replica half the micro-batches.
    """
    layout, train = baseline.evidence.layout, baseline.evidence.config.train
    if layout.tp % 2 or train.num_micro_batches % 2:
        return None
    # With one rank nothing is exchanged any more.
    exchanges = {key: 0.0 if layout.tp == 2 else baseline.seconds[key] - own for key, own in without_exchanges.items()}
    seconds = {key: 2 * own + exchanges[key] for key, own in without_exchanges.items()}
    settings = {
        "tp": layout.tp // 2,
        "dp": layout.dp * 2,
        "num_micro_batches": train.num_micro_batches // 2,
    }
    found = best_change(baseline, [settings], seconds)
    if found is None:
        return None
    unknown = " (its reductions over replicas not counted)" if layout.dp == 1 else ""
    return f"{found.text()}{unknown}", found.brings


def exposed_dp(baseline: Baseline) -> Finding | None:
    """Return what reductions of gradients and gathers of weights cost that nothing hides.

    Removed: they take no time. What only a lack of memory gathers again (`memory`) is not counted here.
    """
    again = gathers_again(baseline)
    exposed = baseline.brings(replace(baseline.costs, reductions={}, gathers={})) - (again.seconds if again else 0.0)
    slowest = max(baseline.ranks, key=lambda rank: rank.reduced)
    if slowest.reduced - exposed > baseline.floor * baseline.step:
        return _reduced_inside(baseline, slowest.pp, slowest.reduced, slowest.reduced - exposed)
    if exposed <= 0.0:
        return None
    waited = [rank.waited_in for rank in baseline.figures.ranks]
    kind = max((Kind.REDUCE, Kind.GATHER), key=lambda kind: max(of_rank.get(kind, 0.0) for of_rank in waited))
    stage = max(range(len(waited)), key=lambda stage: waited[stage].get(kind, 0.0))
    what = "the reduction of gradients" if kind is Kind.REDUCE else "the gather of weights"
    held = [bucket for bucket in baseline.plan.buckets if baseline.plan.chunks[bucket.chunks[0]].rank == stage]
    counted = f"{len(held)} bucket{'s' if len(held) != 1 else ''}"
    evidence = (
        f"stage {stage} waits {seconds_text(waited[stage].get(kind, 0.0))} of {seconds_text(baseline.step)} in "
        f"w[{kind}] for {what} over dp {baseline.evidence.layout.dp}, in {counted}"
    )
    found = best_change(baseline, _of_replicas(baseline))
    change, brought = (found.text(), found.brings) if found else larger_batch(baseline) or ("", 0.0)
    return Finding(Fault.EXPOSED_DP, exposed, evidence, change, brought)


def _reduced_inside(baseline: Baseline, stage: int, seconds: float, brings: float) -> Finding:
    """Return that reductions run inside backward instead of beside it."""
    last = next(action for action in reversed(baseline.plan.actions[stage]) if action.reduces)
    evidence = (
        f"stage {stage} reduces gradients for {seconds_text(seconds)} of {seconds_text(baseline.step)} inside "
        f"backward, as in {last}, which goes on only when they are summed"
    )
    change = "sums that run beside backward, by NCCL or between ranks of one host,"
    if baseline.evidence.config.train.reduction == "exact":
        change += " or --train.reduction fast,"
    return Finding(Fault.EXPOSED_DP, seconds, evidence, change, brings)


def _of_replicas(baseline: Baseline) -> list[dict[str, Any]]:
    """Return settings that communicate less between replicas, or earlier."""
    parallel = baseline.evidence.config.parallel
    largest = max((bucket.num_bytes for bucket in baseline.evidence.profile.buckets.values()), default=0)
    sizes = {min(parallel.bucket_bytes, largest) // number for number in (2, 4, 8, _MOST_BUCKETS)}
    smaller: list[dict[str, Any]] = [
        {"bucket_bytes": size} for size in sorted(sizes, reverse=True) if size >= _LEAST_BUCKET_BYTES
    ]
    less: list[dict[str, Any]] = [{"zero": stage} for stage in range(parallel.zero_in_effect)]
    return smaller + less


def memory_pressure(baseline: Baseline) -> Finding | None:
    """Return the dearest of the three ways in which a lack of memory takes time."""
    found = [find(baseline) for find in (recomputation, gathers_again, allocator)]
    return max((finding for finding in found if finding), key=lambda finding: finding.seconds, default=None)


def recomputation(baseline: Baseline) -> Finding | None:
    """Return what it costs that backward computes again what forward did not keep.

    Removed: of each backward, the time of the forward that it repeats: the measured forward's, times the share of it
    that the model says is repeated.
    """
    config = baseline.evidence.config
    if config.parallel.recompute == "none":
        return None
    removed = _without(baseline, Recompute.NONE)
    brings = baseline.brings(baseline.costs_with(removed))
    again = {key: baseline.seconds[key] - removed[key] for key in baseline.seconds}
    kind, chunk = max(again, key=lambda key: again[key])
    evidence = (
        f"--parallel.recompute {config.parallel.recompute} computes again for {seconds_text(again[kind, chunk])} of "
        f"{seconds_text(baseline.seconds[kind, chunk])} in each {chunk}{kind} what its forward did not keep"
    )
    choices = [
        evaluated(baseline, settings, settings, _without(baseline, Recompute(settings["recompute"])))
        for settings in _less_recomputation(baseline)
    ]
    change = best_of(baseline, choices)
    if change is None:
        change = _with_more_memory(baseline, {"recompute": "none"}, removed)
        if config.parallel.memory_limit:
            evidence += f", for which the run's limit of {config.parallel.memory_limit:,} bytes has no room"
    return _finding(brings, evidence, change)


def gathers_again(baseline: Baseline) -> Finding | None:
    """Return what it costs that gathered weights are freed after each use, and gathered again.

    Removed: they stay from their first to their last use in the step.
    """
    if baseline.evidence.layout.residency is not Residency.USE or baseline.evidence.config.parallel.zero != 3:
        return None
    settings = {"residency": "step"}
    change = evaluated(baseline, settings, settings) or _with_more_memory(baseline, settings, None)
    if change is None:
        return None
    waited = [rank.waited_in.get(Kind.GATHER, 0.0) for rank in baseline.figures.ranks]
    stage = waited.index(max(waited))
    evidence = (
        f"weights are gathered for each use, and stage {stage} waits {seconds_text(waited[stage])} of "
        f"{seconds_text(baseline.step)} in w[g]"
    )
    return _finding(change.brings, evidence, change)


def allocator(baseline: Baseline) -> Finding | None:
    """Return what it costs that a GPU's allocator finds no memory in one piece, gives all back and asks again.

    Removed: what the steps took longer than their actions' medians do, in which single stalls do not count.
    """
    profile = baseline.evidence.profile
    retries_by_rank = [rank.allocator_retries for rank in profile.ranks]
    retries = max(retries_by_rank)
    stalls = statistics.median(step.plan for step in profile.steps) - baseline.timeline.makespan
    if not retries or stalls <= 0.0:
        return None
    evidence = (
        f"rank {retries_by_rank.index(retries)} had to give its memory back and ask again {retries} times in "
        f"{len(profile.steps)} steps, which take longer than their actions' medians"
    )
    change = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or a smaller --train.micro-batch-size,"
    return Finding(Fault.MEMORY, stalls, evidence, change, stalls)


def _finding(seconds: float, evidence: str, change: Change | None) -> Finding | None:
    if change is None or seconds <= 0.0 or change.brings <= 0.0:
        return None
    return Finding(Fault.MEMORY, seconds, evidence, change.text(), change.brings)


def _less_recomputation(baseline: Baseline) -> Iterator[dict[str, Any]]:
    """Yield other amounts of recomputation, and each of them with more of the state sharded."""
    parallel = baseline.evidence.config.parallel
    sharded = [parallel.zero] if parallel.dp == 1 else range(parallel.zero, ZERO_OF_SLICED_WEIGHTS + 1)
    for recompute in Recompute:
        for zero in sharded:
            yield {"recompute": recompute.value} | ({} if zero == parallel.zero else {"zero": zero})


def _with_more_memory(baseline: Baseline, settings: dict[str, Any], seconds: Seconds | None) -> Change | None:
    """Return a change that does not fit into the run's limit, with the limit that it needs."""
    found = evaluated(baseline, {**settings, "memory_limit": 0}, settings, seconds)
    if found is None:
        return None
    return replace(found, flags=f"{found.flags} --parallel.memory-limit {found.peak_bytes}")


def _without(baseline: Baseline, recompute: Recompute) -> Seconds:
    """Return the seconds of actions when backward recomputes so much instead."""
    plan = replace(baseline.plan, chunks=tuple(replace(chunk, recompute=recompute) for chunk in baseline.plan.chunks))
    other = action_seconds(baseline.evidence.config, baseline.evidence.layout, plan, baseline.machine)
    found = dict(baseline.seconds)
    for kind, chunk in baseline.seconds:
        if kind not in (Kind.B, Kind.I):
            continue
        # Measured seconds for one that the model counts.
        scale = baseline.seconds[Kind.F, chunk] / baseline.modelled[Kind.F, chunk].compute
        saved = (baseline.modelled[kind, chunk].again - other[kind, chunk].again) * scale
        found[kind, chunk] -= min(saved, _MOST_AGAIN * found[kind, chunk])
    return found
