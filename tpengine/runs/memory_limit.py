"""Whether a run fits into memory, before a process group exists: what a rank will hold against what there is.

What it will hold the planner says: this is the one function of a wing that the core imports, and late. train.py alone
calls what is here, so that a run's loop does not reach the planner.
"""

from __future__ import annotations

import torch
from tpkernels.symmetric.host_memory import available_bytes

from tpengine.config import Config
from tpengine.distributed.launch import Launch
from tpengine.plan import Residency


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
    from tpengine.planner.modelled.memory import residency_that_fits

    return residency_that_fits(config, memory_limit(config, launch, device), launch.rank, device.type)
