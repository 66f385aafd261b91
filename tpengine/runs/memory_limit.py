"""Whether a run fits into memory, before a process group exists: what a rank will hold against what there is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tpkernels.symmetric.host_memory import available_bytes

from tpengine.config import Config, phases_of
from tpengine.distributed.launch import Launch
from tpengine.distributed.mesh import Shape
from tpengine.layout.step_plan import layout_of, phase_layouts, training_plan
from tpengine.plan import Residency
from tpengine.planner.machine import Machine, machine_on
from tpengine.planner.modelled.memory import RankMemory, decided_residency, memory_of, smaller_settings


def memory_limit(config: Config, launch: Launch, device: torch.device) -> int:
    """Return the bytes that a rank may use, of its GPU or as its share of this host's free memory; 0 if unknown."""
    if config.parallel.memory_limit:
        return config.parallel.memory_limit
    if device.type == "cuda":
        # Ranks that share a card share its memory.
        sharing = -(-launch.local_world_size // torch.cuda.device_count())
        return int(torch.cuda.get_device_properties(device).total_memory) // sharing
    return available_bytes() // launch.local_world_size


def fitting_residency(config: Config, launch: Launch, device: torch.device) -> Residency:
    """Decide how long gathered weights stay, and check that this rank's memory is enough.

    Args:
        config: validated.
        launch: this rank's place.
        device: where it computes.

    Returns:
        The decision; hosts with other limits may decide otherwise, and then the ranks' plans differ, which is said.

    Raises:
        ValueError: the rank would hold more than there is: how much, where, and the nearest setting that fits.
    """
    machine = machine_on(device.type)
    limit = memory_limit(config, launch, device)
    phases = phases_of(config)
    decided = [decided_residency(phase.config, limit, machine) for phase in phases]
    residency = next((one for one in decided if one is Residency.USE), decided[0])
    for phase, layout in zip(phases, phase_layouts(phases, residency, device.type == "cuda"), strict=True):
        where = f"in phase {phase.number + 1} " if len(phases) > 1 else ""
        needed = memory_of(phase.config, layout, training_plan(phase.config, layout), machine)
        _check_fits(phase.config, needed, limit, launch, machine, where)
    return residency


def _check_fits(
    config: Config, on_stages: Sequence[RankMemory], limit: int, launch: Launch, machine: Machine, when: str
) -> None:
    needed = on_stages[Shape.of(config.parallel).coordinates(launch.rank).pp]
    if limit and needed.peak > limit:
        fitting = (
            words
            for words, other in smaller_settings(config)
            if all(rank.peak <= limit for rank in _on_stages(other, None, machine))
        )
        words = next(fitting, "")
        remedy = f"use {words}" if words else "use more ranks, or a smaller --train.micro-batch-size"
        where = "--parallel.memory-limit" if config.parallel.memory_limit else "what there is"
        raise ValueError(
            f"a rank's memory must be enough: by the plan {when}rank {launch.rank} would hold "
            f"{needed.peak / 1e6:,.1f} MB in {needed.action}, "
            f"{(needed.peak - limit) / 1e6:,.1f} MB more than {where}, {limit / 1e6:,.1f} MB: {remedy}"
            f", or allow it with --parallel.memory-limit {needed.peak}"
        )


def _on_stages(config: Config, residency: Residency | None, machine: Machine) -> tuple[RankMemory, ...]:
    layout = layout_of(config, residency)
    return memory_of(config, layout, training_plan(config, layout), machine)
