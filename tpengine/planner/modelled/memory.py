"""What a training run holds on each rank, in bytes, before it runs: by kind, its peak, and where that is.

The state between steps follows from the layout (layout/state_bytes.py), the rest from the simulated step. On GPUs the
buffers of communicators count, as NCCL's sources tell (distributed/nccl_limits.py). Not counted: the process itself,
its libraries, memory that ranks share to exchange tensors, and the copy of the state that a checkpoint is written from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tpengine.config import Config, phases_of
from tpengine.layout.state_bytes import StateBytes, state_bytes
from tpengine.layout.step_plan import Layout, check_phases, layout_of, phase_layouts, training_plan
from tpengine.plan import Plan, Residency
from tpengine.plan.clock import RankTimeline
from tpengine.planner import Costs, simulate
from tpengine.planner.machine import CPU_CORE, Machine, machine_on
from tpengine.planner.memory import memory_curve, slot_bytes
from tpengine.planner.modelled.caches import prepared_bytes
from tpengine.planner.modelled.costs import communicator_bytes, model_costs

_LOAD_STEP = 0.01
_Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank of a pipeline: of the first replica and tp rank, from which others differ by little.

    Attributes:
        state: between steps.
        prepared: copies of weights that a CPU's matmuls read faster.
        slots: buffers that receives write to.
        communicators: NCCL's buffers, on GPUs; an estimate.
        gathered, unsummed, activations: the most that is held at once of gathered weights, of gradients that are not
            summed yet, and of what micro-batches keep and work with.
        peak: the most of everything at once.
        action: what runs then.
    """

    state: StateBytes
    prepared: int
    slots: int
    gathered: int
    unsummed: int
    activations: int
    peak: int
    action: str
    communicators: int = 0

    @property
    def compute_action(self) -> str:
        """Return what runs then, without the transfers that it starts: 0B3 of 0B3[r1 r2]."""
        return self.action.partition("[")[0]

    def kinds(self) -> dict[str, int]:
        """Return the bytes by kind, in words; kinds of which there is nothing are left out."""
        found = {
            "weights": self.state.weights,
            "weights prepared for matmuls": self.prepared,
            "gathered weights": self.gathered,
            "gradients": self.state.gradients,
            "gradients not summed yet": self.unsummed,
            "masters": self.state.masters,
            "moments": self.state.moments,
            "activations": self.activations,
            "receive slots": self.slots,
            "NCCL's buffers (estimate)": self.communicators,
        }
        return {name: num_bytes for name, num_bytes in found.items() if num_bytes}


def memory_of(
    config: Config, layout: Layout, plan: Plan, machine: Machine = CPU_CORE, load: float = 1.0
) -> tuple[RankMemory, ...]:
    """Return what each pipeline rank holds while it runs a training plan.

    Args:
        config: validated.
        layout, plan: of that configuration.
        machine: a CPU or a GPU; decides what overlaps, and so a little what is held at once.
        load: of the rank that gets most, as Sizes has it.
    """
    costs = model_costs(config, layout, plan, machine, load=load)
    timeline = simulate(plan, costs)
    found = []
    for rank, lanes in enumerate(timeline.ranks):

        def curve(rank: int = rank, lanes: RankTimeline = lanes, **held: Any) -> _Curve:
            return memory_curve(plan, rank, lanes, replace(Costs(costs.compute), **held))

        slots, boundaries = slot_bytes(plan, rank), curve()
        activations = curve(activations=costs.activations)
        found.append(
            RankMemory(
                state=state_bytes(config, layout, rank),
                prepared=prepared_bytes(config, layout, rank, machine),
                slots=slots,
                gathered=_most(curve(weights=costs.weights), boundaries),
                unsummed=_most(curve(contributions=costs.contributions), boundaries),
                activations=int(max(held for _, held in activations)) - slots,
                peak=int(lanes.peak_bytes),
                action=_action_at_peak(lanes),
                communicators=communicator_bytes(config, layout, machine),
            )
        )
    return tuple(found)


def _most(curve: _Curve, base: _Curve) -> int:
    """Return by how much one curve is above another at most."""
    return int(max(_held(curve, time) - _held(base, time) for time, _ in (*curve, *base)))


def _held(curve: _Curve, time: float) -> float:
    return curve[bisect_right(curve, time, key=lambda change: change[0]) - 1][1]


def decided_residency(config: Config, limit: int, machine: Machine = CPU_CORE) -> Residency:
    """Return how long gathered weights stay: as asked, or with `residency auto` the fastest, simulated, that fits.

    Args:
        config: validated.
        limit: bytes per rank; 0 for no limit. Where nothing fits, what takes least.
        machine: for whose rates.
    """
    if config.parallel.zero_in_effect != 3 or config.parallel.residency != "auto":
        return layout_of(config).residency

    def judged(residency: Residency) -> tuple[bool, float]:
        layout = layout_of(config, residency)
        plan = training_plan(config, layout)
        timeline = simulate(plan, model_costs(config, layout, plan, machine))
        peak = max(rank.peak_bytes for rank in timeline.ranks)
        is_too_large = bool(limit) and peak > limit
        return is_too_large, peak if is_too_large else timeline.makespan

    return min(Residency, key=judged)


def smaller_settings(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield settings that take less memory, the cheapest in time first, with the words to ask for them."""
    parallel = config.parallel
    choices: list[dict[str, Any]] = []
    if parallel.dp and parallel.dp > 1:
        choices += [{"zero": stage} for stage in (1, 2, 3) if stage > parallel.zero]
        choices += [{"zero": 3, "residency": "use"}]
    for recompute in ("attention", "block", "full"):
        choices.append({"recompute": recompute})
        if parallel.dp and parallel.dp > 1:
            choices.append({"zero": 3, "residency": "use", "recompute": recompute})
    for choice in choices:
        smaller = _with(config, **choice)
        if smaller != config:
            yield " ".join(f"--parallel.{name} {value}" for name, value in choice.items()), smaller


def residency_that_fits(config: Config, limit: int, rank: int, device: str) -> Residency:
    """Decide how long gathered weights stay, and check that a rank's memory is enough for every phase.

    Args:
        config: validated.
        limit: bytes that the rank may use; 0 for any number.
        rank: of the run.
        device: where it computes, cpu or cuda.

    Returns:
        The decision, for all phases.

    Raises:
        ValueError: the rank would hold more than there is: how much, where, and the nearest setting that fits. Or
            groups of parameters that the model does not have.
    """
    machine = machine_on(device)
    phases = phases_of(config)
    check_phases(phases)
    decided = [decided_residency(phase.config, limit, machine) for phase in phases]
    residency = next((one for one in decided if one is Residency.USE), decided[0])
    for phase, layout in zip(phases, phase_layouts(phases, residency, device == "cuda"), strict=True):
        where = f"in phase {phase.number + 1} " if len(phases) > 1 else ""
        needed = memory_of(phase.config, layout, training_plan(phase.config, layout), machine)
        _check_fits(phase.config, needed[rank // (layout.dp * layout.tp)], limit, rank, machine, where)
    return residency


def most_load(config: Config, layout: Layout, plan: Plan, limit: int, machine: Machine = CPU_CORE) -> float:
    """Return up to which load of the rank whose experts get most a plan fits into memory; found to a hundredth.

    Args:
        config: validated.
        layout, plan: of that configuration; they fit at an even load.
        limit: bytes per rank; 0 for no limit.
        machine: as memory_of.

    Returns: as Sizes has a load. At most ep: then one rank's experts get every row.

    Cost: where it does not fit at every load, a dozen simulated steps.
    """
    most = float(layout.ep)

    def fits(load: float) -> bool:
        return max(rank.peak for rank in memory_of(config, layout, plan, machine, load)) <= limit

    if layout.ep == 1 or not limit or fits(most):
        return most
    least = 1.0
    while most - least > _LOAD_STEP:
        middle = (least + most) / 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def _check_fits(config: Config, needed: RankMemory, limit: int, rank: int, machine: Machine, when: str) -> None:
    if limit and needed.peak > limit:
        fitting = (
            words
            for words, other in smaller_settings(config)
            if all(held.peak <= limit for held in _on_stages(other, machine))
        )
        words = next(fitting, "")
        remedy = f"use {words}" if words else "use more ranks, or a smaller --train.micro-batch-size"
        even = "with experts used evenly " if config.parallel.ep > 1 else ""
        where = "--parallel.memory-limit" if config.parallel.memory_limit else "what there is"
        raise ValueError(
            f"a rank's memory must be enough: by the plan {when}{even}rank {rank} would hold "
            f"{needed.peak / 1e6:,.1f} MB in {needed.action}, "
            f"{(needed.peak - limit) / 1e6:,.1f} MB more than {where}, {limit / 1e6:,.1f} MB: {remedy}"
            f", or allow it with --parallel.memory-limit {needed.peak}"
        )


def _on_stages(config: Config, machine: Machine) -> tuple[RankMemory, ...]:
    layout = layout_of(config)
    return memory_of(config, layout, training_plan(config, layout), machine)


def _with(config: Config, **parallel: Any) -> Config:
    return replace(config, parallel=replace(config.parallel, **parallel))


def _action_at_peak(lanes: RankTimeline) -> str:
    time = next((time for time, held in lanes.memory if held == lanes.peak_bytes), 0.0)
    running = [span.action for span in lanes.compute if span.start <= time]
    return str(running[-1]) if running else "the beginning"
