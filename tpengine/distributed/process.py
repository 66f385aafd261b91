"""Start and end of one process: which device it computes on, which backend connects the ranks."""

from __future__ import annotations

import gc
import hashlib
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

# This module's functions have the default group as a default argument. If it were imported later (the optimizer does),
# they would keep that group, and its threads, alive after `stop`.
import torch.distributed.nn.functional
from torch import Tensor
from tpkernels.symmetric.processes import host_identity
from tpkernels.symmetric.signals import PeerError

from tpengine.distributed.facts import RankFacts, cards
from tpengine.distributed.groups import library_timeout, nccl_options
from tpengine.distributed.launch import Launch, loopback_variables, network_identity
from tpengine.distributed.meeting import Meeting
from tpengine.distributed.nccl_limits import PROCESSORS_FOR_FEW_BYTES, nccl_variables, users_limit

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

    CUDA begins when it is first asked for a device, and reads its environment then: NCCL's variables are set before.
    """
    if wanted != "cpu" and dist.is_nccl_available():
        os.environ.update(nccl_variables(os.environ, nccl_version()))
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"--device cuda needs a CUDA device: torch {torch.__version__} sees none: use --device cpu")
    return torch.device("cuda", launch.local_rank % torch.cuda.device_count())


def start(
    device: torch.device,
    launch: Launch,
    meeting: Meeting,
    timeout_seconds: float = 0.0,
    problem_of: Callable[[Sequence[RankFacts]], str] | None = None,
) -> None:
    """Create the default process group: NCCL if every process has a GPU of its own, else gloo.

    Co-located processes (several on one GPU) cannot use NCCL; their data goes through the host, which is printed once.
    The choice depends on the GPUs' identities on all nodes, so it is the same on every rank. If all processes are on
    this host, gloo listens on loopback only, unless GLOO_SOCKET_IFNAME says otherwise.

    NCCL is bound to the device: its communicator is made here, and the mesh's groups are split off it (groups.py).

    Args:
        meeting: of the ranks, which have met.
        timeout_seconds: train.timeout_seconds; see library_timeout.
        problem_of: returns what of the ranks' facts cannot work, in one line, or nothing.

    Raises:
        ValueError: on all ranks alike, with the line of `problem_of`.
    """
    if device.type == "cuda":
        _prepare_cuda(device)
    facts = [RankFacts(**of_rank) for of_rank in meeting.tell("facts", asdict(own_facts(device)))]
    if problem_of is not None and (problem := problem_of(facts)):
        # All have found it. Rank 0, with which the store goes, stays until they have heard.
        meeting.agree(problem, lambda _: None, "whether the ranks go together")
        raise ValueError(problem)
    backend = "gloo"
    if device.type == "cuda":
        num_cards = len(cards(facts))
        backend = "nccl" if num_cards == launch.world_size else "gloo"
        if backend == "gloo" and launch.rank == 0:
            print(
                f"tpengine: {launch.world_size} processes share {num_cards} GPU(s): communication goes through the "
                "host (gloo), not NCCL",
                file=sys.stderr,
            )
    # All ranks reach each other over loopback: without LOCAL_RANK, one host is only a guess.
    if launch.local_world_size == launch.world_size and len({of.network for of in facts}) == 1:
        # The mesh's groups read this variable too.
        os.environ.update(loopback_variables(os.environ))
    groups = dist.PrefixStore("groups", meeting.store)  # type: ignore[attr-defined]
    given: dict[str, Any] = {}
    if backend == "nccl":
        # Of all ranks together little is exchanged: numbers at the end of a step, and texts.
        given = {"device_id": device, "pg_options": nccl_options(PROCESSORS_FOR_FEW_BYTES)}
    dist.init_process_group(
        backend,
        store=groups,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=library_timeout(timeout_seconds, nccl=backend == "nccl"),
        **given,
    )


def _prepare_cuda(device: torch.device) -> None:
    """Begin with CUDA on a device."""
    if grows_segments(os.environ) is None:
        # Memory that is given back waits for its own stream. Without, freeing waits for all of the device: for ever,
        # if a receive that is posted waits for what this rank has yet to launch.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.cuda.set_device(device)
    # Otherwise a DeviceMesh would initialise CUDA itself, on the GPU numbered LOCAL_RANK.
    torch.cuda.init()


def grows_segments(environ: Mapping[str, str]) -> bool | None:
    """Return whether the user has torch's allocator grow its segments; None if no variable says it."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        said = re.search(r"expandable_segments\s*:\s*(\w+)", environ.get(name, ""))
        if said:
            return said[1].lower() == "true"
    return None


def nccl_version() -> tuple[int, ...]:
    """Return NCCL's version; empty if this torch has none."""
    return tuple(torch.cuda.nccl.version()) if dist.is_nccl_available() else ()


def own_facts(device: torch.device) -> RankFacts:
    """Return what this rank tells the others of itself (facts.py)."""
    host, network = socket.gethostname(), network_identity()
    if device.type == "cpu":
        return RankFacts(host, network)
    found, driver = torch.cuda.get_device_properties(device), torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    return RankFacts(
        host,
        network,
        gpu=found.name,
        card=str(found.uuid),
        processors=found.multi_processor_count,
        nccl=".".join(map(str, nccl_version())),
        driver=f"{driver // 1000}.{driver % 1000 // 10}",
        users_limit=users_limit(os.environ),
    )


def make_deterministic(device: torch.device) -> None:
    """Make every operation give the same bits for the same operands, as exact mode needs.

    A CPU uses one thread, because libraries cut sums over threads; a GPU torch's deterministic algorithms.
    """
    if device.type == "cpu":
        torch.set_num_threads(1)
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch requires it
    torch.use_deterministic_algorithms(True)


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


def read_with_largest(own: Tensor, shared: Tensor, told: Tensor) -> tuple[list[float], list[float], Tensor]:
    """Read a vector of this rank and the maximum of another over all ranks, while waiting for the device only once.

    Args:
        own, shared: float64 [n] and [m], on the device; `shared` has no NaN.
        told: int64 [k], on the device: what every rank hears from every other in the same exchange.

    Returns:
        The numbers of `own`; the elementwise maximum over all ranks of `shared`; all ranks' `told` [world, k], on the
        device.

    Cost: one all-gather of 8 (m + k) bytes per rank.
    """
    if dist.get_world_size() == 1:
        alone = torch.cat([own, shared]).tolist()
        return alone[: own.numel()], alone[own.numel() :], told.view(1, -1)
    # Together, so that one copy brings them to a host that exchanges them.
    numbers = torch.cat([own.view(torch.int64), shared.view(torch.int64), told]).to(link_device(own.device))
    own_numbers, mine = numbers[: own.numel()].view(torch.float64), numbers[own.numel() :]
    everyone = torch.empty(dist.get_world_size(), mine.numel(), dtype=torch.int64, device=mine.device)
    dist.all_gather(list(everyone.unbind()), mine)
    largest = everyone[:, : shared.numel()].contiguous().view(torch.float64).amax(0)
    found = torch.cat([own_numbers, largest]).tolist()
    reports = everyone[:, shared.numel() :]
    return found[: own.numel()], found[own.numel() :], to_device(reports, own.device)


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
