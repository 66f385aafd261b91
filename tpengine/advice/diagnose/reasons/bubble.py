"""A pipeline that waits for want of micro-batches: it fills and drains for a large part of the step."""

from __future__ import annotations

from tpengine.advice.diagnose.baseline import Baseline
from tpengine.advice.diagnose.changes import best_change, costs_of_part, larger_batch, other_schedules
from tpengine.advice.diagnose.finding import Fault, Finding, percent
from tpengine.plan import SCHEDULES, lower, make_schedule, verify
from tpengine.simulate import simulate

# A micro-batch is split into at most this many: of smaller ones nothing says that their time is a part of it.
_MOST_SPLITS = 16
# A split must bring at least this share of the step: a bubble of some 15 % is as planned. Smaller micro-batches cost
# what no profile of larger ones shows.
_LEAST_SPLIT = 0.08


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
    )
    verify(split)
    return baseline.timeline.makespan - simulate(split, costs_of_part(baseline, split, 1.0 / splits)).makespan
