"""The step as it was recorded, simulated again: what every removal of a fault and every change is compared with.

A replica that is slower than the others decides how long the step takes, so the pipeline that computes longest is
simulated, with the costs of its own ranks, not with the medians over all. A difference of two simulations is a
difference between plans alone: what the simulator leaves out is left out on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tpengine.advice.diagnose.evidence import Evidence
from tpengine.plan import Kind, Plan, Timeline
from tpengine.simulate import Costs, StepFigures, simulate
from tpengine.simulate.machine import CPU_CORE, MACHINES, Machine
from tpengine.simulate.modelled.actions import action_seconds, chunk_seconds, machine_of_ranks
from tpengine.simulate.modelled.times.sums import ActionSeconds
from tpengine.simulate.profiles.costs import costs_for
from tpengine.simulate.profiles.file import CostProfile
from tpengine.simulate.profiles.ranks import RankProfile

# Seconds of compute actions by kind and chunk.
Seconds = Mapping[tuple[Kind, int], float]

# Nobody changes a run for less, and simulations of measured costs are off by up to 3 % themselves
# (pipeline_prediction.jsonl in benchmarks/results).
_LEAST_SHARE = 0.05


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
