"""One layout, worked out: its verified plan, the simulated step, parts, memory and share of the peak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from tpengine.advice.sheets.parts import StepParts
from tpengine.config import Config, validate
from tpengine.layout.flops import step_flops
from tpengine.layout.step_plan import Layout, layout_of, training_plan
from tpengine.plan import Plan, Residency, Timeline
from tpengine.simulate import simulate
from tpengine.simulate.machine import Machine
from tpengine.simulate.modelled.actions import action_seconds
from tpengine.simulate.modelled.costs import model_costs
from tpengine.simulate.modelled.memory import RankMemory, memory_of


@dataclass(frozen=True)
class Sheet:
    """A configuration's step as it would run on a machine.

    Attributes:
        config: validated.
        machine: its rates.
        layout, plan, timeline: who holds what, the verified plan, and its simulation.
    """

    config: Config
    machine: Machine
    layout: Layout
    plan: Plan
    timeline: Timeline

    @classmethod
    def of(
        cls,
        config: Config,
        machine: Machine,
        builds: Callable[[Config, Layout], Plan] = training_plan,
        balanced_for: int = 0,
    ) -> Sheet:
        """Build and simulate the plan that a run of this configuration executes.

        Args:
            config: with tp, pp and dp.
            machine: its rates.
            builds: what builds the plan, by default verified.
            balanced_for: as layout_of.

        Raises:
            ValueError: the configuration is not legal; the rule, the values and the nearest choice.
        """
        parallel = config.parallel
        config = validate(config, (parallel.tp or 1) * (parallel.pp or 1) * (parallel.dp or 1))
        residency = None if config.parallel.residency == "auto" else Residency(config.parallel.residency)
        layout = layout_of(config, residency, balanced_for, machine.is_asynchronous)
        plan = builds(config, layout)
        return cls(config, machine, layout, plan, simulate(plan, model_costs(config, layout, plan, machine)))

    @cached_property
    def seconds(self) -> float:
        """Return the step's length."""
        return self.timeline.makespan

    @cached_property
    def peak_bytes(self) -> float:
        """Return the most that a rank holds."""
        return max(rank.peak_bytes for rank in self.timeline.ranks)

    @cached_property
    def parts(self) -> StepParts:
        """Where the time goes."""
        return StepParts.of(self.plan, self.timeline, action_seconds(self.config, self.layout, self.plan, self.machine))

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """What each pipeline rank holds, by kind."""
        return memory_of(self.config, self.layout, self.plan, self.machine)

    def share_of_peak(self, *, causal_half: bool = True, counts_again: bool = False) -> float:
        """Return model flops (or, with what is computed again, hardware flops) over what the peak allows."""
        flops = step_flops(self.config, causal_half=causal_half, counts_again=counts_again)
        num_ranks = self.layout.tp * self.layout.pp * self.layout.dp
        return flops / self.seconds / (self.machine.peak(self.config.train.dtype) * num_ranks)
