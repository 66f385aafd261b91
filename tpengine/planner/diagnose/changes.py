"""Changes of a run's settings: the plan that the changed run would execute, verified, with the recorded costs.

What the simulator predicts of a change assumes that an action takes as long as its layers and its tokens: half a
micro-batch takes half as long. Reductions and gathers take a time for each collective and one for each byte, fitted
over the recorded buckets; with buckets of one size alone, a time for each byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tpengine.config import Config, validate
from tpengine.dtypes import dtype_bytes
from tpengine.layout.slices import slice_numel
from tpengine.layout.step_plan import Layout, gradient_bytes, layout_of, training_plan
from tpengine.plan import SCHEDULES, Plan, Weights
from tpengine.planner import Costs, simulate
from tpengine.planner.diagnose.evidence import Baseline, Seconds
from tpengine.planner.modelled.memory import memory_of
from tpengine.planner.profiles.costs import costs_for

# An interleaved schedule leaves open how many chunks a rank has.
_CHUNKS_PER_RANK = (2, 4)


@dataclass(frozen=True)
class Change:
    """A change of settings, and what it brings.

    Attributes:
        flags: as a run takes them.
        brings: by how many seconds the step is shorter.
        more_bytes: what the rank that holds most holds more than before, by the plan.
        peak_bytes: what it holds then.
    """

    flags: str
    brings: float
    more_bytes: int
    peak_bytes: int

    def text(self) -> str:
        """Return the flags, and what they cost in memory if that is more than before."""
        return f"{self.flags} ({self.more_bytes / 1e6:,.1f} MB more)" if self.more_bytes > 0 else self.flags


def changed(config: Config, **settings: Any) -> Config:
    """Return a configuration with other settings of its sections parallel and train, by their names."""
    parallel = {name: value for name, value in settings.items() if hasattr(config.parallel, name)}
    train = {name: value for name, value in settings.items() if name not in parallel}
    return replace(config, parallel=replace(config.parallel, **parallel), train=replace(config.train, **train))


def flags_of(config: Config, **settings: Any) -> str:
    """Return settings as flags."""
    section = {name: "parallel" if hasattr(config.parallel, name) else "train" for name in settings}
    return " ".join(f"--{section[name]}.{name.replace('_', '-')} {value}" for name, value in settings.items())


def other_schedules(baseline: Baseline) -> list[dict[str, Any]]:
    """Return the settings of every other schedule."""
    parallel = baseline.evidence.config.parallel
    found: list[dict[str, Any]] = []
    for name, form in SCHEDULES.items():
        numbers = _CHUNKS_PER_RANK if form.num_chunks is None else (None,)
        found += [{"schedule": name} if num is None else {"schedule": name, "chunks_per_rank": num} for num in numbers]
    return [settings for settings in found if any(getattr(parallel, name) != value for name, value in settings.items())]


def best_change(
    baseline: Baseline, candidates: list[dict[str, Any]], seconds: Seconds | None = None, **fixed: Any
) -> Change | None:
    """Return the candidate that brings most, of those that are legal, fit into the run's memory and bring enough.

    Args:
        baseline: the step as recorded.
        candidates: settings by name.
        seconds: of the compute actions after the change, for the same micro-batches; default as recorded.
        fixed: settings that all candidates share and that are no part of the change.
    """
    changes = [evaluated(baseline, {**fixed, **settings}, settings, seconds) for settings in candidates]
    return best_of(baseline, changes)


def best_of(baseline: Baseline, changes: Iterable[Change | None]) -> Change | None:
    """Return the change that brings most, and more than what counts."""
    least = baseline.floor * baseline.step
    return max((c for c in changes if c and c.brings > least), key=lambda change: change.brings, default=None)


def larger_batch(baseline: Baseline, times: int = 2) -> tuple[str, float] | None:
    """Return flags for a batch several times as large, and what they bring for each batch of today's size.

    Returns: None where such a run is not legal or does not fit, or where that is less than what counts.
    """
    train = baseline.evidence.config.train
    settings = {"num_micro_batches": train.num_micro_batches * times}
    found = evaluated(baseline, settings, settings)
    if found is None:
        return None
    # What is outside the plan is once for a step, but for the reading.
    profile = baseline.evidence.profile
    fixed = max(0.0, profile.outside_seconds - max(rank.read for rank in profile.ranks))
    step = baseline.timeline.makespan + fixed
    brings = step - (step - found.brings) / times
    if brings <= baseline.floor * baseline.step:
        return None
    return f"{found.text()}, a batch {times} times as large, for each batch of today's size", brings


def evaluated(
    baseline: Baseline, settings: Mapping[str, Any], shown: Mapping[str, Any], seconds: Seconds | None = None
) -> Change | None:
    """Simulate a change; None where it is not legal, or does not fit into the memory that the run was given."""
    before = baseline.evidence.config
    try:
        config = validate(changed(before, **settings), len(baseline.evidence.profile.ranks))
        residency = (
            None
            if "residency" in settings or not config.parallel.zero_in_effect
            else baseline.evidence.layout.residency
        )
        layout = layout_of(config, residency)
        plan = training_plan(config, layout)
    except ValueError:
        return None
    peak = peak_bytes(baseline, config, layout, plan)
    limit = config.parallel.memory_limit
    if limit and peak > limit:
        return None
    held = peak_bytes(baseline, before, baseline.evidence.layout, baseline.plan)
    makespan = simulate(plan, costs_after(baseline, config, layout, plan, seconds)).makespan
    return Change(flags_of(config, **shown), baseline.timeline.makespan - makespan, peak - held, peak)


def peak_bytes(baseline: Baseline, config: Config, layout: Layout, plan: Plan) -> int:
    """Return the most that a rank holds, by the plan."""
    return max(rank.peak for rank in memory_of(config, layout, plan, baseline.machine))


def costs_after(baseline: Baseline, config: Config, layout: Layout, plan: Plan, seconds: Seconds | None) -> Costs:
    """Return the costs of a changed run's plan."""
    before = baseline.evidence.config
    tokens = config.train.micro_batch_size / before.train.micro_batch_size
    costs = costs_of_part(baseline, plan, tokens, seconds)
    reductions, gathers = _collectives(baseline, config, layout, plan)
    return replace(costs, reductions=reductions, gathers=gathers)


def costs_of_part(baseline: Baseline, plan: Plan, part: float, seconds: Seconds | None = None) -> Costs:
    """Return the costs of a plan whose micro-batches have `part` of the tokens that the recorded ones had."""
    taken = {key: value * part for key, value in (seconds or baseline.seconds).items()}
    profile = baseline.profile_with(taken)
    scaled = {name: getattr(profile, name) * part for name in ("send_seconds", "receive_seconds", "link_seconds")}
    if part != 1.0 and plan.chunks[0].output is not None:
        # Seconds of a link are those of a boundary tensor, which shrinks alike.
        scaled["boundary"] = plan.chunks[0].output
    return costs_for(replace(profile, **scaled), plan)


def _collectives(
    baseline: Baseline, config: Config, layout: Layout, plan: Plan
) -> tuple[dict[int, float], dict[int, float]]:
    """Return seconds of reductions and gathers by bucket: as recorded for the same buckets, else by their bytes.

    A run of one replica has recorded none of replicas; they are not counted then.
    """
    recorded, before = baseline.evidence.profile.buckets, baseline.evidence.layout
    if plan.buckets == baseline.plan.buckets and (layout.dp, layout.tp) == (before.dp, before.tp):
        return (
            {index: bucket.seconds for index, bucket in recorded.items()},
            {index: bucket.gather_seconds for index, bucket in recorded.items()},
        )
    if before.dp == 1 and layout.dp > 1:
        # Recorded are at most the small sums that tensor-parallel ranks make: they tell nothing of replicas.
        return {}, {}
    # Without ZeRO a reduction leaves the whole sum everywhere: two halves of a ring. With it, one.
    halves = 1 if before.zero else 2
    start, per_byte = _fitted([(bucket.num_bytes, bucket.seconds / halves) for bucket in recorded.values()])
    if before.dp > 1 and layout.dp > 1:
        # A rank of a ring sends (n - 1) / n of the bytes.
        per_byte *= (1.0 - 1.0 / layout.dp) / (1.0 - 1.0 / before.dp)
    item, wide = dtype_bytes(config.train.dtype), gradient_bytes(config.train.dtype)
    numel = {b.index: layout.dp * slice_numel(layout.buckets[b.index].layout, layout.dp) for b in plan.buckets}
    reductions = {index: (1 if layout.zero else 2) * (start + per_byte * size * wide) for index, size in numel.items()}
    gathers = {
        bucket.index: start + per_byte * numel[bucket.index] * item
        for bucket in plan.buckets
        if bucket.weights is not Weights.WHOLE
    }
    return reductions, gathers


def _fitted(measured: list[tuple[int, float]]) -> tuple[float, float]:
    """Fit seconds = start + per_byte * bytes by least squares; neither is negative."""
    num = len(measured)
    mean_bytes = sum(size for size, _ in measured) / num if num else 0.0
    mean_seconds = sum(seconds for _, seconds in measured) / num if num else 0.0
    if not mean_bytes:
        return mean_seconds, 0.0
    variance = sum((size - mean_bytes) ** 2 for size, _ in measured)
    # Sizes that differ by less than a quarter say nothing about a start.
    if variance > num * (mean_bytes / 4) ** 2:
        slope = sum((size - mean_bytes) * (seconds - mean_seconds) for size, seconds in measured) / variance
        start = mean_seconds - slope * mean_bytes
        if slope >= 0.0 and start >= 0.0:
            return start, slope
        if slope < 0.0:
            return mean_seconds, 0.0
    return 0.0, mean_seconds / mean_bytes
