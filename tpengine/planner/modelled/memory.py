"""What a training run holds on each rank, in bytes, before it runs: by kind, its peak, and where that is.

The state between steps follows from the layout (layout/state_bytes.py), the rest from the simulated step. On GPUs the
buffers of communicators count, as NCCL's sources tell (distributed/nccl_limits.py), and memory through which kernels
move experts' rows. Not counted: the process itself, its libraries, other memory that ranks share to exchange tensors,
and the copy of the state that a checkpoint is written from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpengine.config import Config, phases_of
from tpengine.layout.decided import Decided, rows_memory_bytes
from tpengine.layout.state_bytes import StateBytes, state_bytes
from tpengine.layout.step_plan import Layout, check_phases, layout_of, phase_layouts, training_plan
from tpengine.plan import Plan, Residency
from tpengine.plan.clock import RankTimeline
from tpengine.planner import Costs, simulate
from tpengine.planner.machine import CPU_CORE, Machine, machine_on
from tpengine.planner.memory import memory_curve, slot_bytes
from tpengine.planner.modelled.caches import prepared_bytes
from tpengine.planner.modelled.costs import communicator_bytes, model_costs

# Of a GPU's memory: the driver's context, communication buffers, blocks that the allocator cannot use.
ALLOCATOR_SHARE = 0.06
# Where the worst case does not fit: a router that is balanced by a loss or a bias stays below, in most steps.
USUAL_ROW_LOAD = 2.0
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
        rows: memory through which kernels move rows of experts, beside the buffers that these end in.
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
    rows: int = 0

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
            "experts' rows on their way": self.rows,
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
        load: of the rank that gets most, as Sizes has it; where a layout has buffers for more, that.
    """
    costs = model_costs(config, layout, plan, machine, load=max(load, layout.row_load))
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
                rows=rows_memory_bytes(config, layout),
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


def decided_that_fits(config: Config, limit: int, rank: int, device: str, moves_rows: bool = False) -> Decided:
    """Decide what depends on memory, and check that a rank's is enough for every phase.

    Args:
        config: validated.
        limit: bytes that the rank may use; 0 for any number.
        rank: of the run.
        device: where it computes, cpu or cuda.
        moves_rows: whether kernels may bring rows to experts, and so into buffers of a fixed size.

    Returns:
        The decisions, for all phases.

    Raises:
        ValueError: the rank would hold more than there is: how much, where, and the nearest setting that fits. Or
            groups of parameters that the model does not have.
    """
    machine = machine_on(device)
    phases = phases_of(config)
    check_phases(phases)
    decided = [decided_residency(phase.config, limit, machine) for phase in phases]
    residency = next((one for one in decided if one is Residency.USE), decided[0])
    layouts = phase_layouts(phases, residency, device == "cuda")
    planned = [
        (phase.config, layout, training_plan(phase.config, layout))
        for phase, layout in zip(phases, layouts, strict=True)
    ]
    row_load = decided_row_load(planned, limit, machine) if moves_rows else 0.0
    for number, (of_phase, layout, plan) in enumerate(planned, 1):
        where = f"in phase {number} " if len(phases) > 1 else ""
        # First without buffers: so what is refused with them would fit without.
        for load in sorted({0.0, row_load}):
            needed = memory_of(of_phase, replace(layout, row_load=load), plan, machine)
            _check_fits(of_phase, needed[rank // (layout.dp * layout.tp)], limit, rank, machine, where, load)
    return Decided(residency, row_load)


def decided_row_load(planned: Sequence[tuple[Config, Layout, Plan]], limit: int, machine: Machine) -> float:
    """Return for how many times the mean number of rows a rank's experts have buffers; 0 for none.

    As asked with parallel.moe_load; else the worst case, in which one rank's experts get all rows, if every phase fits
    into memory with it; else USUAL_ROW_LOAD if that fits; else none, and rows travel at their exact number. Nobody has
    asked for buffers, so they leave ALLOCATOR_SHARE of what there is: a run that fits without them must not end by
    them. A limit that was asked for is filled.

    Args:
        planned: configuration, layout and plan of each phase.
        limit: bytes per rank; 0 for no limit.
        machine: as memory_of.
    """
    parallel = planned[0][0].parallel
    if parallel.moe_load:
        return min(parallel.moe_load, float(parallel.ep))
    room = limit if parallel.memory_limit else limit * (1 - ALLOCATOR_SHARE)

    def fits(load: float) -> bool:
        return not limit or all(
            rank.peak <= room
            for config, layout, plan in planned
            for rank in memory_of(config, replace(layout, row_load=load), plan, machine)
        )

    return next((load for load in (float(parallel.ep), USUAL_ROW_LOAD) if load <= parallel.ep and fits(load)), 0.0)


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


def _check_fits(
    config: Config, needed: RankMemory, limit: int, rank: int, machine: Machine, when: str, row_load: float
) -> None:
    if limit and needed.peak > limit:
        fitting = (
            words
            for words, other in smaller_settings(config)
            if all(held.peak <= limit for held in _on_stages(other, machine))
        )
        words = next(fitting, "")
        remedy = f"use {words}" if words else "use more ranks, or a smaller --train.micro-batch-size"
        even = "with experts used evenly " if config.parallel.ep > 1 else ""
        if row_load:
            even = f"with buffers for {row_load:g} times the mean of experts' rows "
            remedy = "use --parallel.moe-load 0, which makes buffers of what memory is left"
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
