"""Communication that computation does not hide: between tensor-parallel ranks, and between data-parallel replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tpengine.advice.diagnose.baseline import Baseline, Seconds, seconds_text
from tpengine.advice.diagnose.changes import best_change, larger_batch
from tpengine.advice.diagnose.finding import Fault, Finding, percent
from tpengine.advice.diagnose.reasons.memory import gathers_again
from tpengine.plan import Kind

# Buckets of a chunk: with more of them each is small, and the start of a collective counts.
_MOST_BUCKETS = 16
_LEAST_BUCKET_BYTES = 1_000


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

    Removed: they take no time. What only a lack of memory gathers again (memory.py) is not counted here.
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
