"""Directories of runs that the simulator made: what a run would have left whose times, and whose faults, are known."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from support.plans.records import recorded
from tpengine.config import Config
from tpengine.config.toml import dump_toml
from tpengine.dtypes import dtype_bytes
from tpengine.layout.slices import slice_numel
from tpengine.layout.step_plan import Layout, gradient_bytes, layout_of, training_plan
from tpengine.observe.records import MeasuredStep, metered_name
from tpengine.plan import Kind, Plan, Residency, Weights
from tpengine.planner import Costs, simulate
from tpengine.planner.machine import CPU_CORE
from tpengine.planner.modelled.costs import action_seconds, chunk_seconds
from tpengine.planner.modelled.memory import memory_of
from tpengine.planner.profiles.file import StageMemory
from tpengine.planner.profiles.record_costs import profile_of, ranks_of, step_seconds

OUTSIDE_SECONDS = 0.01


@dataclass(frozen=True)
class Truth:
    """What a synthetic run takes, beside the model's seconds of its layers.

    Args:
        slower: by (pp, dp, tp), by what factor a rank computes longer.
        work: by chunk, by what factor every rank computes longer.
        exchange: share of an action in which tensor-parallel ranks exchange.
        seconds_per_byte: of a reduction's or a gather's bytes, for half a ring.
        read: seconds to read the text, by stage.
        issue: share of an action that the host is in it.
        reduced: seconds of a step that reductions take inside backward, instead of beside it.
        ends: what the model's ends take, as multiples of what the model says.
        starved: by (pp, dp, tp), by what factor an action takes longer because other threads run on its core.
        stall: seconds that a step takes longer, because an allocator asks again.
        jitter: by how many percent the steps of metrics.jsonl differ at most.
    """

    slower: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    work: Mapping[int, float] = field(default_factory=dict)
    exchange: float = 0.0
    seconds_per_byte: float = 0.0
    read: Mapping[int, float] = field(default_factory=dict)
    issue: float = 1.0
    reduced: float = 0.0
    ends: float = 1.0
    starved: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    stall: float = 0.0
    jitter: float = 1.0


def costs_of(
    config: Config, layout: Layout, plan: Plan, truth: Truth, place: Callable[[int], tuple[int, int, int]]
) -> Costs:
    """The true costs of a plan for the pipeline whose rank of a stage has this place."""
    compute = {}
    for (kind, chunk), seconds in action_seconds(config, layout, plan, CPU_CORE).items():
        slower = max(
            (f for (pp, dp, _), f in truth.slower.items() if (pp, dp) == place(plan.chunks[chunk].rank)[:2]),
            default=1.0,
        )
        slower *= truth.starved.get(place(plan.chunks[chunk].rank), 1.0)
        ends = (truth.ends - 1.0) * ends_seconds(config, layout, plan, kind, chunk)
        own = (seconds.compute + seconds.again + ends) * truth.work.get(chunk, 1.0) * slower
        compute[kind, chunk] = own / (1.0 - truth.exchange)
    size = {b.index: layout.dp * slice_numel(layout.buckets[b.index].layout, layout.dp) for b in plan.buckets}
    wide, item = gradient_bytes(config.train.dtype), dtype_bytes(config.train.dtype)
    halves = 1 if layout.zero else 2
    return Costs(
        compute=compute,
        bytes_per_time=5e9,
        reductions={index: halves * numel * wide * truth.seconds_per_byte for index, numel in size.items()},
        gathers={
            b.index: size[b.index] * item * truth.seconds_per_byte
            for b in plan.buckets
            if b.weights is not Weights.WHOLE
        },
        clip=1e-4,
        step=1e-3,
    )


def ends_seconds(config: Config, layout: Layout, plan: Plan, kind: Kind, chunk: int) -> float:
    """What the model says of the ends in an action."""
    whole = action_seconds(config, layout, plan, CPU_CORE)[kind, chunk]
    layers = chunk_seconds(config, layout.tp, CPU_CORE, plan.chunks[chunk], is_first=False, is_last=False)[kind]
    return whole.compute + whole.again - layers.compute - layers.again


def seconds_of(config: Config, truth: Truth, residency: Residency | None = None) -> float:
    """The true time of a step."""
    layout = layout_of(config, residency)
    plan = training_plan(config, layout)
    makespans = [
        simulate(plan, costs_of(config, layout, plan, truth, lambda pp, dp=dp: (pp, dp, 0))).makespan  # type: ignore[misc]
        for dp in range(layout.dp)
    ]
    return max(makespans) + OUTSIDE_SECONDS + max(truth.read.values(), default=0.0) + truth.stall + truth.reduced


def write_run(run_dir: Path, config: Config, truth: Truth, residency: Residency | None = None) -> Path:
    """Write what a run of a configuration leaves whose truth this is; return its directory."""
    layout = layout_of(config, residency)
    plan = training_plan(config, layout)
    pipelines, places, metered = [], [], []
    for dp in range(layout.dp):
        for _ in range(layout.tp):
            costs = costs_of(config, layout, plan, truth, lambda pp, dp=dp: (pp, dp, 0))  # type: ignore[misc]
            pipelines.append(recorded(plan, simulate(plan, costs)))
    for pp in range(layout.pp):
        for dp in range(layout.dp):
            costs = costs_of(config, layout, plan, truth, lambda pp, dp=dp: (pp, dp, 0))  # type: ignore[misc]
            for tp in range(layout.tp):
                places.append((pp, dp, tp))
                metered.append(_metered(config, layout, plan, costs.compute, truth, (pp, dp, tp)))
    seconds = seconds_of(config, truth, residency)
    steps = [MeasuredStep(number, seconds, tuple(pipelines)) for number in (3, 4)]
    bucket_bytes = {i: b.layout.numel * gradient_bytes(config.train.dtype) for i, b in layout.buckets.items()}
    profile = replace(
        profile_of(plan, steps, bucket_bytes, layout.residency),
        steps=tuple(replace(step, plan=step.plan + truth.stall) for step in step_seconds(plan, steps)),
        ranks=ranks_of(steps, places, metered),
        memory=tuple(
            StageMemory(held.kinds(), held.peak, held.action, 0, held.peak, "resident set of the process")
            for held in memory_of(config, layout, plan)
        ),
    )
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.toml").write_text(dump_toml(config))
    (run_dir / "profile.json").write_bytes(profile.to_json())
    with (run_dir / "metrics.jsonl").open("w") as metrics:
        for step in range(30):
            differs = (step % 5 - 2) / 2 * truth.jitter / 100
            metrics.write(json.dumps({"step": step + 1, "step_seconds": seconds * (1.0 + differs)}) + "\n")
    return run_dir


def _metered(
    config: Config,
    layout: Layout,
    plan: Plan,
    compute: Mapping[tuple[Kind, int], float],
    truth: Truth,
    place: tuple[int, int, int],
) -> dict[str, object]:
    """What a rank's meter has: of a slow tensor-parallel group the others wait in their exchanges for the slow rank."""
    group = [factor for (pp, dp, _), factor in truth.slower.items() if (pp, dp) == place[:2]]
    own_share = truth.slower.get(place, 1.0) / max(group, default=1.0)
    actions = {
        metered_name(kind, chunk): [
            seconds * truth.issue,
            seconds * truth.issue * (1 - (1 - truth.exchange) * own_share),
            0.0,
            0.0
            if kind is Kind.W
            else truth.ends
            * truth.slower.get(place, 1.0)
            * truth.starved.get(place, 1.0)
            * ends_seconds(config, layout, plan, kind, chunk),
            seconds * truth.issue * (1.0 - 1.0 / truth.starved.get(place, 1.0)),
        ]
        for (kind, chunk), seconds in compute.items()
        if plan.chunks[chunk].rank == place[0]
    }
    return {
        "actions": actions,
        "read": truth.read.get(place[0], 0.0),
        "reduced": truth.reduced,
        "retries": 5 if truth.stall else 0,
    }
