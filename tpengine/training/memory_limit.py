"""Whether a run fits into memory, before a process group exists: what a rank will hold against what there is."""

from __future__ import annotations

import torch
from tpkernels.symmetric.host_memory import available_bytes

from tpengine.config import Config
from tpengine.distributed.launch import Launch
from tpengine.distributed.mesh import Shape
from tpengine.layout.step_plan import layout_of, training_plan
from tpengine.simulate.modelled.memory import RankMemory, memory_of, smaller_settings, with_residency


def memory_limit(config: Config, launch: Launch, device: torch.device) -> int:
    """Return the bytes that a rank may use, of its GPU or as its share of this host's free memory; 0 if unknown."""
    if config.parallel.memory_limit:
        return config.parallel.memory_limit
    if device.type == "cuda":
        # Ranks that share a card share its memory.
        sharing = -(-launch.local_world_size // torch.cuda.device_count())
        return int(torch.cuda.get_device_properties(device).total_memory) // sharing
    return available_bytes() // launch.local_world_size


def fitted(config: Config, launch: Launch, device: torch.device) -> Config:
    """Decide how long gathered weights stay, and check that this rank's memory is enough.

    Args:
        config: validated.
        launch: this rank's place.
        device: where it computes.

    Returns:
        The configuration, with `parallel.residency auto` decided.

    Raises:
        ValueError: the rank would hold more than there is: how much, where, and the nearest setting that fits.
    """
    limit = memory_limit(config, launch, device)
    # What is free on a CPU's host differs from host to host, and from start to start: it decides nothing.
    config = with_residency(config, limit if config.parallel.memory_limit or device.type == "cuda" else 0)
    stage = Shape.of(config.parallel).coordinates(launch.rank).pp
    needed = _on_stage(config, stage)
    if limit and needed.peak > limit:
        fitting = next(
            (words for words, other in smaller_settings(config) if _on_stage(other, stage).peak <= limit), ""
        )
        remedy = f"use {fitting}" if fitting else "use more ranks, or a smaller --train.micro-batch-size"
        where = "--parallel.memory-limit" if config.parallel.memory_limit else "what there is"
        raise ValueError(
            f"a rank's memory must be enough: rank {launch.rank} would hold {needed.peak / 1e6:,.1f} MB in "
            f"{needed.action}, {(needed.peak - limit) / 1e6:,.1f} MB more than {where}, {limit / 1e6:,.1f} MB: {remedy}"
        )
    return config


def _on_stage(config: Config, stage: int) -> RankMemory:
    layout = layout_of(config)
    return memory_of(config, layout, training_plan(config, layout))[stage]
