"""Whether a run fits into memory, before a process group exists: what a rank will hold against what there is.

What it will hold the planner says: this is the one function of a wing that the core imports, and late. train.py alone
calls what is here, so that a run's loop does not reach the planner.
"""

from __future__ import annotations

import torch
from tpkernels.fused.kernels.counts_kernel import MOST_EXPERTS
from tpkernels.launch import INTERPRETED
from tpkernels.ops.matmul.kernel import KERNEL_DTYPES
from tpkernels.symmetric.host_memory import available_bytes
from tpkernels.symmetric.signals_kernel import MAX_WORLD

from tpengine.config import Config
from tpengine.distributed.launch import Launch
from tpengine.layout.decided import Decided


def memory_limit(config: Config, launch: Launch, device: torch.device) -> int:
    """Return the bytes that a rank may use, of its GPU or as its share of this host's free memory; 0 if unknown."""
    if config.parallel.memory_limit:
        return config.parallel.memory_limit
    if device.type == "cuda":
        # Ranks that share a card share its memory.
        sharing = -(-launch.local_world_size // torch.cuda.device_count())
        return int(torch.cuda.get_device_properties(device).total_memory) // sharing
    return available_bytes() // launch.local_world_size


def decided_by_memory(config: Config, launch: Launch, device: torch.device) -> Decided:
    """Decide what depends on memory, and check that this rank's is enough.

    Args:
        config: validated.
        launch: this rank's place.
        device: where it computes.

    Returns:
        The decisions. Hosts with other limits may decide otherwise: of buffers for rows all ranks take the least, other
        differences are refused once the ranks have met.

    Raises:
        ValueError: the rank would hold more than there is: how much, where, and the nearest setting that fits.
    """
    from tpengine.planner.modelled.memory import decided_that_fits

    limit = memory_limit(config, launch, device)
    return decided_that_fits(config, limit, launch.rank, device.type, kernels_move_rows(config, launch, device))


def kernels_move_rows(config: Config, launch: Launch, device: torch.device) -> bool:
    """Return whether kernels may bring rows to experts: of ranks that share them on one host, in fast mode, on GPUs.

    GPUs that cannot address each other's memory are found out later; there collectives are used, which is said.
    """
    parallel, train = config.parallel, config.train
    return (
        1 < parallel.ep <= MAX_WORLD
        and launch.local_world_size % parallel.ep == 0
        and (device.type == "cuda" or INTERPRETED)
        and train.reduction == "fast"
        and parallel.tp_comm == "fused"
        and getattr(torch, train.dtype) in KERNEL_DTYPES
        and config.model.details.num_experts <= MOST_EXPERTS
    )
