"""A finding: one reason why the step takes as long as it does, with what its removal is worth.

The step as it was recorded, simulated again: what every removal of a fault and every change is compared with.

A replica that is slower than the others decides how long the step takes, so the pipeline that computes longest is
simulated, with the costs of its own ranks, not with the medians over all. A difference of two simulations is a
difference between plans alone: what the simulator leaves out is left out on both sides.

The evidence: what a run has left in its directory, read and compared.

config.toml says what was to run, profile.json what the recorded steps cost, metrics.jsonl how long every step took. The
profile must be of the plan that config.toml describes: a directory may have been used twice. Of a run with phases the
plan and the steps are those of the phase that was recorded.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from tpengine import journal
from tpengine.architectures.model_path import architecture_of_run
from tpengine.config import Config, phases_of, validate_run
from tpengine.config.toml import load_toml
from tpengine.layout.step_plan import Layout, phase_layouts, training_plan
from tpengine.plan import SCHEDULES, Kind, Plan, Timeline
from tpengine.planner import Costs, StepFigures, simulate
from tpengine.planner.machine import CPU_CORE, MACHINES, Machine
from tpengine.planner.modelled.costs import action_seconds, chunk_seconds, machine_of_ranks
from tpengine.planner.modelled.memory import memory_of
from tpengine.planner.modelled.operators import ActionSeconds
from tpengine.planner.profiles.costs import costs_for
from tpengine.planner.profiles.file import CostProfile, read_profile
from tpengine.planner.profiles.ranks import RankProfile

# Seconds of compute actions by kind and chunk.
Seconds = Mapping[tuple[Kind, int], float]
# Nobody changes a run for less, and simulations of measured costs are off by up to 3 % themselves
# (pipeline_prediction.jsonl in benchmarks/results).
_LEAST_SHARE = 0.05
_MAX_METRICS_BYTES = 1_000_000_000


class Fault(StrEnum):
    """The reasons that are told apart; the value is what is printed."""

    SLOW_RANK = "slow rank"
    UNEVEN_STAGES = "uneven stages"
    SLOW_INPUT = "slow input"
    FEW_MICRO_BATCHES = "too few micro-batches"
    EXPOSED_TP = "exposed tp"
    EXPOSED_DP = "exposed dp"
    MEMORY = "memory pressure"
    HOST = "host-bound"
    NONE = "healthy"


@dataclass(frozen=True)
class Finding:
    """A reason.

    Args:
        fault: its kind.
        seconds: by how much the step is shorter without it, by the simulator.
        evidence: what was seen, in words with the names of actions.
        change: what to change, as a command's flags where there are some.
        brings: by how much the step is shorter after the change, by the simulator on the changed, verified plan.
    """

    fault: Fault
    seconds: float
    evidence: str
    change: str
    brings: float

    def text(self, step: float) -> str:
        """Return the reason in one line; `step`: the seconds of the whole step."""
        share = f"{self.fault}, {percent(self.seconds / step)} of the step"
        if not self.change:
            return f"{share}: {self.evidence}"
        return f"{share}: {self.evidence}: {self.change} brings {seconds_text(self.brings)}"


def percent(share: float) -> str:
    """Return a share in words: 22 %."""
    return f"{share:.0%}".replace("%", " %")


@dataclass(frozen=True)
class Baseline:
    """A recorded step and its simulation.

    Args:
        evidence: what the run has left.
    """

    evidence: Evidence

    @cached_property
    def floor(self) -> float:
        """Return the share of the step below which nothing counts: 5 %, or by how much the run's steps differ."""
        return max(_LEAST_SHARE, self.evidence.spread)

    @property
    def is_noisy(self) -> bool:
        """Return whether the run's own steps differ by more than what counts at least."""
        return self.floor > _LEAST_SHARE

    @property
    def step(self) -> float:
        """Return the seconds of the recorded step."""
        return self.evidence.step

    @property
    def plan(self) -> Plan:
        """Return the run's plan."""
        return self.evidence.plan

    @cached_property
    def ranks(self) -> tuple[RankProfile, ...]:
        """Return the pipeline that computes longest, by stage; of its tensor-parallel ranks one: they end together."""
        pipelines: dict[tuple[int, int], list[RankProfile]] = {}
        for rank in self.evidence.profile.ranks:
            pipelines.setdefault((rank.dp, rank.tp), []).append(rank)
        longest = max(pipelines.values(), key=lambda ranks: max(map(seconds_per_microbatch, ranks)))
        return tuple(sorted(longest, key=lambda rank: rank.pp))

    @cached_property
    def seconds(self) -> Seconds:
        """Return what its compute actions take, without reductions that did not run beside them."""
        return {key: action.seconds - action.reducing for rank in self.ranks for key, action in rank.actions.items()}

    @cached_property
    def machine(self) -> Machine:
        """Return the machine whose rates say how stages compare, where nothing measured does."""
        return MACHINES["h200"] if self.evidence.config.device == "cuda" else CPU_CORE

    @cached_property
    def modelled(self) -> Mapping[tuple[Kind, int], ActionSeconds]:
        """Return what the model says of its compute actions."""
        return action_seconds(self.evidence.config, self.evidence.layout, self.plan, self.machine)

    @cached_property
    def modelled_layers(self) -> Mapping[tuple[Kind, int], ActionSeconds]:
        """Return what the model says of the layers of its compute actions, without the model's ends."""
        config, layout = self.evidence.config, self.evidence.layout
        machine = machine_of_ranks(config, layout, self.plan, self.machine)
        return {
            (kind, index): seconds
            for index, chunk in enumerate(self.plan.chunks)
            for kind, seconds in chunk_seconds(config, layout.tp, machine, chunk, is_first=False, is_last=False).items()
        }

    def profile_with(self, seconds: Seconds) -> CostProfile:
        """Return the profile with other times of its compute actions."""
        chunks = tuple(
            replace(chunk, seconds={kind: seconds[kind, index] for kind in chunk.seconds})
            for index, chunk in enumerate(self.evidence.profile.chunks)
        )
        return replace(self.evidence.profile, chunks=chunks)

    def costs_with(self, seconds: Seconds) -> Costs:
        """Return the plan's costs with other times of its compute actions."""
        return costs_for(self.profile_with(seconds), self.plan)

    @cached_property
    def costs(self) -> Costs:
        """Return the plan's costs as recorded."""
        return self.costs_with(self.seconds)

    @cached_property
    def timeline(self) -> Timeline:
        """Return the simulated step."""
        return simulate(self.plan, self.costs)

    @cached_property
    def figures(self) -> StepFigures:
        """Return where its time went."""
        return StepFigures.of(self.plan, self.timeline)

    @property
    def bubble(self) -> float:
        """Return the share of the plan's time in which ranks wait for ranks that are not that far yet."""
        return max(0.0, self.figures.bubble - self.figures.exposed)

    def brings(self, costs: Costs) -> float:
        """Return by how many seconds the plan's step is shorter with other costs."""
        return self.timeline.makespan - simulate(self.plan, costs).makespan

    def waits(self, *ranks: int) -> str:
        """Return in words the longest wait of some stages: 1.9 s of 10.1 in w[RECV_B]."""
        rank = max(ranks, key=lambda rank: sum(self.figures.ranks[rank].waited_in.values()))
        waited = self.figures.ranks[rank].waited_in
        if not waited:
            return "nobody waits"
        kind = max(waited, key=lambda kind: waited[kind])
        name = {Kind.TIE_REDUCE: "t0", Kind.CLIP: "CLIP"}.get(kind, f"w[{kind}]")
        return f"{seconds_text(waited[kind])} of {seconds_text(self.step)} in {name}"


def seconds_per_microbatch(rank: RankProfile) -> float:
    """Return what a rank computes of a micro-batch."""
    return sum(action.seconds - action.reducing for action in rank.actions.values())


def seconds_text(seconds: float) -> str:
    """Return seconds in words, with two significant digits, or one after the point: 10.1 s, 0.052 s."""
    if abs(seconds) >= 1.0:
        return f"{seconds:.1f} s"
    return f"{float(f'{seconds:.2g}'):g} s"


@dataclass(frozen=True)
class Evidence:
    """What a run has left.

    Attributes:
        config: validated, its layout resolved; of the phase that was recorded, and without the others.
        layout, plan: of that configuration; the plan is verified.
        profile: of that plan, with what each rank did.
        step_seconds: of every step of that phase that metrics.jsonl has, but for its first, which loads kernels, and
            those that are recorded.
    """

    config: Config
    layout: Layout
    plan: Plan
    profile: CostProfile
    step_seconds: tuple[float, ...]

    @property
    def step(self) -> float:
        """Return the seconds of a recorded step, the median."""
        return statistics.median(step.seconds for step in self.profile.steps)

    @property
    def spread(self) -> float:
        """Return by what share of itself the run's step varies: 0 if that is not known.

        The largest of three: half of all other steps lie within this range around their median; the median of the
        recorded steps is this far from the slowest and the fastest of them, on average; it is this far from the median
        of the others.
        """
        recorded = [step.seconds for step in self.profile.steps]
        found = (max(recorded) - min(recorded)) / (2 * self.step)
        if len(self.step_seconds) > 2:
            median = statistics.median(self.step_seconds)
            # Not quartiles: of three steps one that is long would move them.
            near = statistics.median(abs(seconds - median) for seconds in self.step_seconds)
            found = max(found, 2 * near / median, abs(self.step - median) / self.step)
        return found


def read_evidence(run_dir: Path, own: str = "") -> Evidence:
    """Read a run's directory.

    Args:
        run_dir: the directory.
        own: the user's own file of the run's architecture; empty takes the run's copy.

    Raises: ValueError: a file is missing or wrong, or the profile is that of another model or layout; one line.
    """
    if not run_dir.is_dir():
        raise ValueError(f"a diagnosis needs the directory of a run: {run_dir} is none: give the directory of the run")
    profile = read_profile(run_dir / "profile.json")
    if not profile.ranks or not profile.steps:
        raise ValueError(
            f"a diagnosis needs what each rank did: {run_dir / 'profile.json'}: it has no ranks, as before there was a "
            "diagnosis: record it again with --train.profile-steps"
        )
    seconds = _read_metrics(run_dir / "metrics.jsonl")
    config = _kept(run_dir, load_toml(run_dir / "config.toml", Config()), own)
    parallel = config.parallel
    config = validate_run(config, math.prod(size or 1 for size in (parallel.tp, parallel.pp, parallel.dp)))
    phases, recorded = phases_of(config), {step.step for step in profile.steps}
    phase = phases.at(min(recorded))
    layout = phase_layouts(phases, profile.residency if config.parallel.zero_in_effect else None)[phase.number]
    config = replace(phase.config, phases="")
    plan = training_plan(config, layout)
    _check_same(run_dir, config, layout, plan, profile)
    usual = set(range(phase.first_step + 1, phase.end_step)) - recorded
    return Evidence(config, layout, plan, profile, tuple(s for n, s in seconds.items() if n in usual))


def _kept(run_dir: Path, config: Config, own: str) -> Config:
    """Return the configuration with the files that the run has kept, wherever its directory is now."""

    def kept(name: str) -> str:
        file = run_dir / Path(name).name
        return str(file) if name and file.is_file() else name

    parallel, model = config.parallel, config.model
    schedule = parallel.schedule if parallel.schedule in SCHEDULES else kept(parallel.schedule)
    architecture = architecture_of_run(run_dir, model.architecture, own)
    return replace(
        config,
        # The sizes of a model that the run began from stand in config.toml; its directory may be gone.
        model=replace(model, path="", architecture=architecture),
        parallel=replace(parallel, schedule=schedule),
        phases=kept(config.phases),
    )


def _check_same(run_dir: Path, config: Config, layout: Layout, plan: Plan, profile: CostProfile) -> None:
    """Compare what the profile says of its plan with the plan of config.toml."""
    compared: dict[str, tuple[Any, Any]] = {
        "schedule": (profile.schedule, plan.schedule),
        "micro-batches": (profile.num_microbatches, plan.num_microbatches),
        "ranks": (len(profile.ranks), layout.pp * layout.dp * layout.tp),
        "layers by chunk": (
            [list(chunk.layers) for chunk in profile.chunks],
            [list(chunk.layers) for chunk in plan.chunks],
        ),
        "boundary tensors": (str(profile.boundary), str(plan.chunks[0].output)),
        "buckets": (sorted(profile.buckets), sorted(bucket.index for bucket in plan.buckets)),
    }
    # Profiles of earlier versions do not say what was held.
    if profile.memory:
        held = [rank.state.weights for rank in memory_of(config, layout, plan)]
        compared["bytes of weights by stage"] = ([of.kinds.get("weights") for of in profile.memory], held)
    for what, (found, wanted) in compared.items():
        if found != wanted:
            raise ValueError(
                f"profile.json must be of the model and layout that config.toml describes: {run_dir}: its {what}: "
                f"{_short(found)}, and by config.toml {_short(wanted)}: record it again with --train.profile-steps"
            )


def _read_metrics(path: Path) -> dict[int, float]:
    """Return seconds by step, from 0; of a step that the run repeated, the newest."""
    try:
        if path.stat().st_size > _MAX_METRICS_BYTES:
            raise ValueError(f"a diagnosis needs the metrics.jsonl of a run: {path}: it has more than 1 GB: cut it")
        rows = journal.read_steps(path)
    except OSError as error:
        raise ValueError(
            f"a diagnosis needs the metrics.jsonl of a run: {path}: {error.strerror}: give the directory of the run"
        ) from None
    # A kill may cut the last line, and a step that was left out has no time.
    found = {row["step"] - 1: float(row["step_seconds"]) for row in rows if _is_time(row.get("step_seconds"))}
    if not found:
        raise ValueError(
            f"a diagnosis needs the metrics.jsonl of a run: {path}: it has no step with step_seconds: let the run take "
            "some steps"
        )
    return found


def _is_time(seconds: object) -> bool:
    # An integer of JSON may be larger than any float; NaN is not below.
    return isinstance(seconds, int | float) and type(seconds) is not bool and 0.0 < seconds <= sys.float_info.max


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
