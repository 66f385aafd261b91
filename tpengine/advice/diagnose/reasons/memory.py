"""Time that is spent for want of memory: computing again, gathering again, and an allocator that asks again."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tpengine.advice.diagnose.baseline import Baseline, Seconds, seconds_text
from tpengine.advice.diagnose.changes import Change, best_of, evaluated
from tpengine.advice.diagnose.finding import Fault, Finding
from tpengine.config.rules import ZERO_OF_SLICED_WEIGHTS
from tpengine.plan import Kind, Recompute, Residency
from tpengine.simulate.modelled.actions import action_seconds

# Backward keeps a part of its time, whatever the model says of what it computes again.
_MOST_AGAIN = 0.9


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
