"""Start and end of one process: which device it computes on, which backend connects the ranks."""

from __future__ import annotations

import gc
import hashlib
import os
import re
import socket
import sys
from typing import Any

import torch
import torch.distributed as dist

# This module's functions have the default group as a default argument. If it were imported later (the optimizer does),
# they would keep that group, and its threads, alive after `stop`.
import torch.distributed.nn.functional
from torch import Tensor
from tpkernels.symmetric.processes import host_identity
from tpkernels.symmetric.signals import PeerError

from tpengine.distributed.launch import Launch, loopback_variables, network_identity

# What gloo, NCCL and the store report when the other side is gone.
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|lost)|broken pipe|closed by peer|socket (error|timeout)|remote process|"
    r"timed out waiting|recv(Value|Bytes) failed|connectFullMesh",
    re.IGNORECASE,
)


def choose_device(wanted: str, launch: Launch) -> torch.device:
    """Return the device on which this process computes.

    Args:
        wanted: "cpu", "cuda" or "auto" (cuda if there is one).

    Returns:
        cuda:LOCAL_RANK, or with fewer visible GPUs than local processes cuda:(LOCAL_RANK mod GPUs), else cpu.

    Raises:
        ValueError: cuda is wanted and there is none.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"--device cuda needs a CUDA device: torch {torch.__version__} sees none: use --device cpu")
    return torch.device("cuda", launch.local_rank % torch.cuda.device_count())


def start(device: torch.device, launch: Launch, store: Any) -> None:
    """Create the default process group: NCCL if every process has a GPU of its own, else gloo.

    Co-located processes (several on one GPU) cannot use NCCL; their data goes through the host, which is printed once.
    The choice depends on the GPUs' identities on all nodes, so it is the same on every rank. If all processes are on
    this host, gloo listens on loopback only, unless GLOO_SOCKET_IFNAME says otherwise.

    Args:
        store: where the ranks have met (meeting.py).
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Otherwise a DeviceMesh would initialise CUDA itself, on the GPU numbered LOCAL_RANK.
        torch.cuda.init()
    backend = "gloo"
    if device.type == "cuda":
        num_cards = len(_cards_of_all_ranks(store, device, launch))
        backend = "nccl" if num_cards == launch.world_size else "gloo"
        if backend == "gloo" and launch.rank == 0:
            print(
                f"tpengine: {launch.world_size} processes share {num_cards} GPU(s): communication goes through the "
                "host (gloo), not NCCL",
                file=sys.stderr,
            )
    if launch.local_world_size == launch.world_size and _share_loopback(store, launch):
        # The mesh's groups read this variable too.
        os.environ.update(loopback_variables(os.environ))
    groups = dist.PrefixStore("groups", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=groups, rank=launch.rank, world_size=launch.world_size)


def make_deterministic(device: torch.device) -> None:
    """Make every operation give the same bits for the same operands, as exact mode needs.

    A CPU uses one thread, because libraries cut sums over threads; a GPU torch's deterministic algorithms.
    """
    if device.type == "cpu":
        torch.set_num_threads(1)
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch requires it
    torch.use_deterministic_algorithms(True)


def _cards_of_all_ranks(store: Any, device: torch.device, launch: Launch) -> set[bytes]:
    """Return all ranks' GPUs, by host and UUID: the number of a visible GPU does not tell whether it is shared."""
    uuid = torch.cuda.get_device_properties(device).uuid
    store.set(f"card/{launch.rank}", f"{socket.gethostname()}/{uuid}")
    return {store.get(f"card/{rank}") for rank in range(launch.world_size)}


def _share_loopback(store: Any, launch: Launch) -> bool:
    """Return whether all ranks reach each other over loopback: without LOCAL_RANK, one host is only a guess."""
    store.set(f"network/{launch.rank}", network_identity())
    return len({store.get(f"network/{rank}") for rank in range(launch.world_size)}) == 1


def stop() -> None:
    """Destroy the process groups and end their threads.

    Call it when no object that holds a group is left. A thread that still frees a tensor when the interpreter ends
    would abort the process.
    """
    dist.destroy_process_group()
    gc.collect()


def lost_peer(error: BaseException | None) -> str:
    """Return how an error, or its cause, says that another rank is at fault; empty if it does not."""
    while error is not None:
        if isinstance(error, PeerError):
            return error.what
        if isinstance(error, (RuntimeError, OSError)) and _LOST.search(str(error)):
            return "a connection closed"
        error = error.__cause__ or error.__context__
    return ""


def differing_ranks(text: str, device: torch.device) -> list[int]:
    """Compare a text over all ranks, by its hash.

    Returns:
        The ranks whose text differs from rank 0's; empty if all agree.
    """
    digest = hashlib.sha256(text.encode()).hexdigest()
    words = [int(digest[i : i + 15], 16) for i in range(0, 60, 15)]
    mine = torch.tensor(words, dtype=torch.int64, device=link_device(device))
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [rank for rank, words_of_rank in enumerate(everyone) if not torch.equal(words_of_rank, everyone[0])]


def max_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Return the elementwise maximum over all ranks, in float64."""
    if dist.get_world_size() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=link_device(device))
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [float(value) for value in tensor.tolist()]


def read_with_largest(own: Tensor, shared: Tensor) -> tuple[list[float], list[float]]:
    """Read a vector of this rank and the maximum of another over all ranks, while waiting for the device only once.

    Args:
        own, shared: float64 [n] and [m], on the device; `shared` has no NaN, which a maximum may lose.

    Returns:
        The numbers of `own`, and the elementwise maximum over all ranks of `shared`.
    """
    both = torch.cat([own, shared])
    if dist.get_world_size() > 1:
        both = both.to(link_device(own.device))
        dist.all_reduce(both[own.numel() :], dist.ReduceOp.MAX)
    numbers = both.tolist()
    return numbers[: own.numel()], numbers[own.numel() :]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device; on CUDA through pinned memory and without waiting."""
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def hosts_of_ranks(device: torch.device) -> list[int]:
    """Return the identity of each rank's host, by rank; collective."""
    mine = torch.tensor([host_identity()], dtype=torch.int64, device=link_device(device))
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [int(host) for host in everyone]


def link_device(device: torch.device) -> torch.device:
    """Return where tensors must be that the default group exchanges: on the GPU for NCCL, else on the host."""
    return device if dist.get_backend() == "nccl" else torch.device("cpu")
