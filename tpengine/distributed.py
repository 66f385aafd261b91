"""Start-up of one process: which rank it is, which device it computes on, which transport connects the ranks."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

# Its functions have the default group as a default argument. Imported later (the optimizer does), they would keep
# that group, and its threads, alive beyond `stop`.
import torch.distributed.nn.functional


@dataclass(frozen=True)
class Process:
    """This process's place, as torchrun describes it (one process if it does not).

    Attributes:
        rank, world_size: over all nodes.
        local_rank, local_world_size: on this node.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Process:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE."""
        world_size = int(environ.get("WORLD_SIZE", "1"))
        return cls(
            int(environ.get("RANK", "0")),
            world_size,
            int(environ.get("LOCAL_RANK", "0")),
            int(environ.get("LOCAL_WORLD_SIZE", str(world_size))),
        )


def choose_device(wanted: str, process: Process) -> torch.device:
    """Choose where this process computes.

    Args:
        wanted: "cpu", "cuda" or "auto" (cuda where there is one).

    Returns:
        cuda:LOCAL_RANK, or with fewer cards than local processes cuda:(LOCAL_RANK mod cards), else cpu.

    Raises:
        ValueError: cuda is wanted and there is none.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"--device cuda needs a CUDA device: torch {torch.__version__} sees none: use --device cpu")
    return torch.device("cuda", process.local_rank % torch.cuda.device_count())


def start(device: torch.device, process: Process) -> None:
    """Create the default process group: NCCL where every process has a card of its own, else gloo.

    Several processes on one card cannot use NCCL; their data is staged through the host, which is said once.
    A process without torchrun makes a group of one and opens no port.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # A DeviceMesh would otherwise initialise CUDA itself, on the card numbered LOCAL_RANK.
        torch.cuda.init()
    elif process.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // process.local_world_size))
    crowded = device.type == "cuda" and process.local_world_size > torch.cuda.device_count()
    if crowded and process.rank == 0:
        print(
            f"tpengine: {process.local_world_size} processes share {torch.cuda.device_count()} GPU(s): "
            "communication goes through the host (gloo), not NCCL",
            file=sys.stderr,
        )
    backend = "nccl" if device.type == "cuda" and not crowded else "gloo"
    if process.world_size == 1 and "MASTER_ADDR" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    else:
        dist.init_process_group(backend)


def stop() -> None:
    """Destroy the process groups and end their threads.

    Call it when whatever holds a group has gone out of scope. A thread that is still letting go of a tensor when the
    interpreter ends would abort the process.
    """
    dist.destroy_process_group()
    gc.collect()


def all_equal(text: str, device: torch.device) -> list[int]:
    """Compare a hexadecimal digest over all ranks.

    Returns:
        The ranks whose digest differs from rank 0's; empty if all agree.
    """
    words = [int(text[i : i + 15], 16) for i in range(0, 60, 15)]
    mine = torch.tensor(words, dtype=torch.int64, device=link_device(device))
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [rank for rank, digest in enumerate(everyone) if not torch.equal(digest, everyone[0])]


def max_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """The elementwise maximum over all ranks, in float64."""
    if dist.get_world_size() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=link_device(device))
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [float(value) for value in tensor.tolist()]


def link_device(device: torch.device) -> torch.device:
    """Where tensors must lie that the default group moves: on the GPU for NCCL, else on the host."""
    return device if dist.get_backend() == "nccl" else torch.device("cpu")
