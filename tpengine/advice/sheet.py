"""One layout, worked out: its verified plan, the simulated step, parts, memory and share of the peak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from tpengine.advice.candidates import Candidate
from tpengine.advice.parts import StepParts
from tpengine.advice.question import Question
from tpengine.config import Config, validate
from tpengine.config.rules import ZERO_OF_SLICED_WEIGHTS
from tpengine.layout.flops import step_flops
from tpengine.layout.step_plan import Layout, layout_of, lowered, training_plan
from tpengine.plan import Plan, Residency, Timeline
from tpengine.plan.actions import COMPUTE
from tpengine.simulate import simulate
from tpengine.simulate.machine import Machine
from tpengine.simulate.modelled.costs import model_costs
from tpengine.simulate.modelled.memory import RankMemory, memory_of
from tpengine.simulate.modelled.operators import action_seconds


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
    def of(cls, config: Config, machine: Machine, builds: Callable[[Config, Layout], Plan] = training_plan) -> Sheet:
        """Build and simulate the plan that a run of this configuration executes.

        Args:
            config: with tp, pp and dp.
            machine: its rates.
            builds: what builds the plan, by default verified.

        Raises:
            ValueError: the configuration is not legal; the rule, the values and the nearest choice.
        """
        parallel = config.parallel
        config = validate(config, (parallel.tp or 1) * (parallel.pp or 1) * (parallel.dp or 1))
        residency = None if config.parallel.residency == "auto" else Residency(config.parallel.residency)
        layout = layout_of(config, residency)
        plan = builds(config, layout)
        return cls(config, machine, layout, plan, simulate(plan, model_costs(config, layout, plan, machine)))

    @property
    def seconds(self) -> float:
        """Return the step's length."""
        return self.timeline.makespan

    @property
    def peak_bytes(self) -> float:
        """Return the most that a rank holds."""
        return max(rank.peak_bytes for rank in self.timeline.ranks)

    @cached_property
    def parts(self) -> StepParts:
        """Where the time goes."""
        return StepParts.of(
            self.plan, self.timeline, action_seconds(self.config, self.layout.tp, self.plan, self.machine)
        )

    @cached_property
    def memory(self) -> tuple[RankMemory, ...]:
        """What each pipeline rank holds, by kind."""
        return memory_of(self.config, self.layout, self.plan, self.machine)

    def share_of_peak(self, *, causal_half: bool = True, counts_again: bool = False) -> float:
        """Return model flops (or, with what is computed again, hardware flops) over what the peak allows."""
        flops = step_flops(self.config, causal_half=causal_half, counts_again=counts_again)
        num_ranks = self.layout.tp * self.layout.pp * self.layout.dp
        return flops / self.seconds / (self.machine.peak(self.config.train.dtype) * num_ranks)


@dataclass(frozen=True)
class Estimate:
    """A step's length and memory, from a plan of fewer micro-batches: a full pipeline repeats itself."""

    seconds: float
    peak_bytes: float


def estimate(layout: Candidate, question: Question) -> Estimate:
    """Simulate a layout, with fewer micro-batches where a whole plan would be long; the plan is not verified.

    Once the pipeline is full each further micro-batch takes as long as the busiest rank computes for one, or as its
    gathers and reductions take; memory has had its peak by then. Where each use of weights waits for a gather, two
    plans say how much longer a micro-batch makes the step.

    Raises:
        ValueError: the configuration is not legal.
    """
    sheet = short_sheet(layout, question)
    number, ranks = sheet.config.train.num_micro_batches, sheet.timeline.ranks
    computing = max(sum(span.duration for span in lanes.compute if span.action.kind in COMPUTE) for lanes in ranks)
    stream = max(sum(span.duration for span in (*lanes.reductions, *lanes.gathers)) for lanes in ranks)
    more = layout.num_micro_batches - number
    if more > 0 and layout.zero == ZERO_OF_SLICED_WEIGHTS and layout.residency == Residency.USE:
        step = min(more, layout.pp)
        longer = short_sheet(layout, question, step)
        each = (longer.seconds - sheet.seconds) / step
        return Estimate(sheet.seconds + more * each, max(sheet.peak_bytes, longer.peak_bytes))
    is_repeated = layout.zero > 1
    each = max(computing, stream if is_repeated else 0.0) / number
    return Estimate(sheet.seconds + more * each, sheet.peak_bytes)


def short_sheet(layout: Candidate, question: Question, more: int = 0) -> Sheet:
    """Simulate a layout with as many micro-batches as fill the pipeline; the plan is not verified.

    Args:
        layout, question: what is simulated.
        more: micro-batches beyond those.

    Raises:
        ValueError: the configuration is not legal.
    """
    config = layout.config(question)
    full = layout.num_micro_batches
    number = full if layout.schedule == "gpipe" else min(full, 2 * layout.pp + more)
    config = replace(config, train=replace(config.train, num_micro_batches=number))
    return Sheet.of(config, question.machine, builds=lowered)
